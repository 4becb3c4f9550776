// The text of a program, line by line, with the user's line of each shown when it is pointed at or focused.

const LINES_AT_ONCE = 1500;
const TOKENS =
  /(%\d+|\$\d+)|(\b\w+::[\w.]+)|(\b(?:float|int|uint|bool|complex|bfloat)\w*\[[^\]]*\])|(\b(?:ROOT=\d+|view|writes|becomes)\b)/g;
const TOKEN_CLASSES = ["", "value", "operation", "type", "mark"];

// One line in the colours of its parts.
function tokens(line) {
  const parts = [];
  let at = 0;
  for (const found of line.matchAll(TOKENS)) {
    if (found.index > at) parts.push(line.slice(at, found.index));
    const group = found.slice(1).findIndex((part) => part !== undefined) + 1;
    parts.push(text(TOKEN_CLASSES[group], found[0]));
    at = found.index + found[0].length;
  }
  if (at < line.length) parts.push(line.slice(at));
  return parts;
}

// Where a line comes from: the line itself, the module, and for a backward call its forward line.
function sourceBar() {
  const bar = element("div", { class: "source-bar", "aria-live": "polite" });
  bar.show = (found, same, gradients) => {
    if (!found) {
      bar.replaceChildren(
        text("faint", "Point at a line, or move through them with the arrow keys, to see where it was recorded."),
      );
      return;
    }
    bar.replaceChildren(
      code(longPlace(found)),
      ...(found.module ? [text("tag", found.module)] : []),
      ...(found.forward
        ? [
            text("faint", "gradient of "),
            code(longPlace(found.forward)),
            ...(found.forward.module ? [text("tag", found.forward.module)] : []),
          ]
        : []),
      text("faint", `${plural(same, "call")} of this line${gradients ? `, ${plural(gradients, "gradient")}` : ""}`),
    );
  };
  bar.show(null);
  return bar;
}

function listing(program) {
  const { texts, sources } = program.lines;
  if (!texts.length) return empty("The text of this program was dropped: too many programs were seen since.");
  const bar = sourceBar();
  const list = element("ol", { class: "listing", "aria-label": `Text of program ${programTitle(program.identity)}` });
  const groups = new Map();
  const found = sources.map((position) => source(position));
  const groupOf = (key) => {
    let group = groups.get(key);
    if (!group) groups.set(key, (group = { calls: [], gradients: [] }));
    return group;
  };
  let marked = [];

  function point(index) {
    for (const item of marked) item.classList.remove("same", "gradient", "pointed");
    marked = [];
    const here = found[index];
    if (!here) {
      bar.show(null);
      return;
    }
    const group = groupOf((here.forward ?? here).key);
    const [alike, related] = here.forward ? [group.gradients, group.calls] : [group.calls, group.gradients];
    for (const item of alike) {
      item.classList.add("same");
      marked.push(item);
    }
    for (const item of related) {
      item.classList.add("gradient");
      marked.push(item);
    }
    list.children[index].classList.add("pointed");
    marked.push(list.children[index]);
    bar.show(here, group.calls.length, group.gradients.length);
  }

  // The line of the call above: a line is named where it begins, and not at each of its calls.
  let before = "";
  function add(from, to) {
    for (let index = from; index < to; index += 1) {
      const here = found[index];
      const item = element(
        "li",
        { tabindex: index ? "-1" : "0", "data-index": index },
        text("where", here && here.key !== before ? shortPlace(here) : ""),
        element("span", { class: "words" }, tokens(run.texts[texts[index]])),
      );
      before = here?.key ?? before;
      if (here?.forward) groupOf(here.forward.key).gradients.push(item);
      else if (here) groupOf(here.key).calls.push(item);
      list.append(item);
    }
  }
  const indexOf = (event) => event.target.closest("li")?.dataset.index;
  list.addEventListener("mouseover", (event) => indexOf(event) && point(Number(indexOf(event))));
  list.addEventListener("focusin", (event) => indexOf(event) && point(Number(indexOf(event))));
  list.addEventListener("keydown", (event) => moveFocus(event, list));

  const most = Math.min(texts.length, LINES_AT_ONCE);
  add(0, most);
  const more =
    most < texts.length
      ? button(
          `Show the other ${count(texts.length - most)} lines`,
          (event) => {
            add(most, texts.length);
            event.target.remove();
          },
          { class: "quiet" },
        )
      : null;
  // Below the lines: a bar above them that grew with a long path would move the line away from the pointer.
  return div("text card flush", element("div", { class: "scroll tall" }, list, more), bar);
}

function moveFocus(event, list) {
  const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20 }[event.key];
  const item = event.target.closest("li");
  if (!step || !item) return;
  event.preventDefault();
  const to = list.children[Math.min(Math.max(Number(item.dataset.index) + step, 0), list.children.length - 1)];
  item.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}
