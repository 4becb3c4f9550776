// Making elements. Data reaches the page as text nodes and nothing else: no markup is ever read from it.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const div = (name, ...children) => element("div", { class: name }, ...children);
const text = (name, ...children) => element("span", { class: name }, ...children);
const code = (...children) => element("code", {}, ...children);
const empty = (sentence) => element("p", { class: "empty" }, sentence);
const note = (...children) => element("p", { class: "note" }, ...children);

function button(label, action, attributes = {}) {
  return element("button", { type: "button", onclick: action, ...attributes }, label);
}

// A line of the user's code: short in the text, whole when asked for.
function place(position) {
  const found = source(position);
  if (!found) return text("place unknown", "unknown line");
  return element(
    "span",
    { class: "place", title: longPlace(found) + (found.module ? ` [${found.module}]` : "") },
    element("code", {}, shortPlace(found)),
    text("in", ` in ${found.name}`),
    found.backward ? text("tag", "backward") : null,
  );
}

function programLink(identity) {
  if (!identity) return text("unknown", "–");
  if (!programs.has(identity)) return text("unknown", `${programTitle(identity)} (dropped)`);
  return button(programTitle(identity), () => showProgram(identity), {
    class: "link",
    title: `Show program ${programTitle(identity)}`,
  });
}

function section(id, title, subtitle, ...children) {
  const heading = element("h2", { id: `${id}-title` }, title);
  return element(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    div("heading", heading, subtitle ? element("p", {}, subtitle) : null),
    ...children,
  );
}

function goTo(target) {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  target.scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "start" });
}

function facts(pairs) {
  return element(
    "dl",
    { class: "facts" },
    pairs
      .filter(([, value]) => value !== null && value !== "")
      .map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
}

// The value of a colour of the style sheet, in the theme of the moment: charts cannot read style sheets.
const probe = element("span", { class: "probe", "aria-hidden": "true" });
function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

// Charts are drawn again when the theme or the window changes.
const drawn = [];
function onRedraw(draw) {
  drawn.push(draw);
}
function redraw() {
  for (const draw of drawn) draw();
}
