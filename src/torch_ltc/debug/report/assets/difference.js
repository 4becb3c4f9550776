// Two programs side by side, or one after the other with what was taken out and put in.

const MOST_EDITS = 6000;
const LINES_AROUND = 3;
const chosenPair = { before: 0, after: 0, mode: innerWidth < 760 ? "unified" : "split" };
const differenceBody = element("div", { class: "difference-body", "aria-live": "polite" });
const pickers = {};

function makeDifference() {
  const rows = run.programs.filter((program) => program.lines.texts.length);
  if (rows.length < 2)
    return section(
      "difference",
      "Compare",
      "",
      empty("Fewer than two programs have their text: there is nothing to compare."),
    );
  const picker = (side, label) => {
    pickers[side] = element(
      "select",
      { "aria-label": label, onchange: (event) => compare(...withSide(side, Number(event.target.value))) },
      rows.map((row) =>
        element(
          "option",
          { value: row.identity },
          `${programTitle(row.identity)} · ${plural(row.calls, "call")} · ${shortPlace(source(row.site))}`,
        ),
      ),
    );
    return pickers[side];
  };
  const modes = ["split", "unified"].map((mode) =>
    button(
      mode === "split" ? "Side by side" : "Unified",
      () => {
        chosenPair.mode = mode;
        for (const other of modes) other.setAttribute("aria-pressed", String(other.dataset.mode === mode));
        drawDifference();
      },
      { "data-mode": mode, "aria-pressed": String(mode === chosenPair.mode) },
    ),
  );
  const [before, after] = firstPair(rows);
  queueMicrotask(() => compare(before, after, false));
  return section(
    "difference",
    "Compare",
    "What two programs have in common, and where they part. A value that only has another number counts as equal.",
    div(
      "tools",
      picker("before", "Program before"),
      button("⇄", () => compare(chosenPair.after, chosenPair.before, false), {
        "aria-label": "Swap the two programs",
        title: "Swap",
      }),
      picker("after", "Program after"),
      div("group", modes),
    ),
    differenceBody,
  );
}

// The largest program that differs from a known one, and that one.
function firstPair(rows) {
  const explained = rows.filter((row) => programs.get(row.explanation?.nearest)?.lines.texts.length);
  if (!explained.length) return [rows.at(-2).identity, rows.at(-1).identity];
  const largest = explained.reduce((most, row) => (row.calls > most.calls ? row : most));
  return [largest.explanation.nearest, largest.identity];
}

const withSide = (side, identity) =>
  side === "before" ? [identity, chosenPair.after, false] : [chosenPair.before, identity, false];

function compare(before, after, scroll = true) {
  if (!pickers.before) return;
  const able = [...pickers.before.options].map((option) => Number(option.value));
  chosenPair.after = able.includes(after) ? after : able.at(-1);
  chosenPair.before = able.includes(before)
    ? before
    : (able.find((identity) => identity !== chosenPair.after) ?? able[0]);
  pickers.before.value = chosenPair.before;
  pickers.after.value = chosenPair.after;
  drawDifference();
  if (scroll) goTo(document.getElementById("difference"));
}

// Lines are paired by what they do, not by the numbers of their values: one new call would renumber all that follow.
function pairLines(before, after) {
  const bare = (line) => line.replace(/%\d+/g, "%");
  const parts = jsdiff.diffArrays(before.map(bare), after.map(bare), { maxEditLength: MOST_EDITS, timeout: 4000 });
  if (!parts) return null;
  const pairs = [];
  let [left, right] = [0, 0];
  for (const part of parts) {
    for (let i = 0; i < part.count; i += 1) {
      if (part.removed) pairs.push({ kind: "removed", before: left++ });
      else if (part.added) pairs.push({ kind: "added", after: right++ });
      else pairs.push({ kind: "same", before: left++, after: right++ });
    }
  }
  const made = besides(pairs, before, after);
  const numbers = new Map();
  for (const pair of made) {
    if (pair.before === undefined || pair.after === undefined) continue;
    if (!sameValues(before[pair.before], after[pair.after], numbers)) pair.kind = "changed";
    pair.numbers = numbers;
  }
  return made;
}

// Whether the values that one line uses, by the lines that are paired above it, are those that the other uses.
function sameValues(before, after, numbers) {
  const values = (words) => words.match(/%\d+/g) ?? [];
  // Values left of "=" are made here, those right of it are used; a line without one only uses.
  const parts = (line) => (line.includes(" = ") ? line.split(/ = (.*)/) : ["", line]);
  const [[made, used], [nowMade, nowUsed]] = [parts(before), parts(after)];
  const now = values(nowUsed);
  const same = values(used).every((value, position) => numbers.get(value) === now[position]);
  values(made).forEach((value, position) => numbers.set(value, values(nowMade)[position]));
  return same;
}

// A line taken out and one put in at the same place that call the same operation are one line that changed.
function besides(pairs, before, after) {
  const operation = (line) => line.match(/[a-z_0-9]+::[A-Za-z_0-9.]+|\binput\b|\bnumber\b/)?.[0];
  const made = [];
  for (let at = 0; at < pairs.length;) {
    if (pairs[at].kind === "same") {
      made.push(pairs[at++]);
      continue;
    }
    const olds = [];
    const news = [];
    while (at < pairs.length && pairs[at].kind !== "same") {
      (pairs[at].kind === "removed" ? olds : news).push(pairs[at++]);
    }
    let used = 0;
    for (const old of olds) {
      const found = news.findIndex(
        (other, position) => position >= used && operation(after[other.after]) === operation(before[old.before]),
      );
      if (found < 0) {
        made.push(old);
        continue;
      }
      made.push(...news.slice(used, found), { kind: "changed", before: old.before, after: news[found].after });
      used = found + 1;
    }
    made.push(...news.slice(used));
  }
  return made;
}

function drawDifference() {
  const [before, after] = [programs.get(chosenPair.before), programs.get(chosenPair.after)];
  const [olds, news] = [before, after].map((program) => program.lines.texts.map((position) => run.texts[position]));
  const pairs = pairLines(olds, news);
  if (!pairs) {
    differenceBody.replaceChildren(empty("These two programs have too little in common to be compared line by line."));
    return;
  }
  const amount = (kind) => pairs.filter((pair) => pair.kind === kind).length;
  const [removed, added, changed] = ["removed", "added", "changed"].map(amount);
  const same = !removed && !added && !changed;
  const explanation = after.explanation?.nearest === before.identity ? after.explanation : null;
  differenceBody.replaceChildren(
    ...(explanation ? [div("card explanation", ...explanationHead(explanation))] : []),
    element(
      "p",
      { class: "summary" },
      same
        ? "The two programs have the same text."
        : [
            text("count-removed", `${count(removed)} only before`),
            " · ",
            text("count-added", `${count(added)} only after`),
            " · ",
            text("count-changed", `${count(changed)} changed`),
            " · ",
            `${count(amount("same"))} equal`,
          ],
    ),
    same ? "" : div("card flush", element("div", { class: "scroll tall" }, differenceTable(pairs, olds, news))),
  );
}

// Equal lines far from any difference are folded; a click unfolds them.
function differenceTable(pairs, olds, news) {
  const near = new Set();
  pairs.forEach((pair, at) => {
    if (pair.kind === "same") return;
    for (let i = at - LINES_AROUND; i <= at + LINES_AROUND; i += 1) near.add(i);
  });
  const columns = chosenPair.mode === "split" ? ["number", "", "number", ""] : ["number", "number", "sign", ""];
  const table = element(
    "table",
    { class: "difference", "aria-label": "Differences" },
    element(
      "colgroup",
      {},
      columns.map((name) => element("col", { class: name })),
    ),
  );
  const body = element("tbody");
  table.append(body);
  for (let at = 0; at < pairs.length;) {
    let end = at;
    while (end < pairs.length && !near.has(end)) end += 1;
    if (end - at > 1) {
      const folded = pairs.slice(at, end);
      const row = element(
        "tr",
        { class: "fold" },
        element(
          "td",
          { colspan: "4" },
          button(
            `${plural(folded.length, "equal line")}`,
            () => row.replaceWith(...folded.flatMap((pair) => differenceRows(pair, olds, news))),
            { class: "link" },
          ),
        ),
      );
      body.append(row);
      at = end;
    } else body.append(...differenceRows(pairs[at++], olds, news));
  }
  return table;
}

function differenceRows(pair, olds, news) {
  const [old, now] = [olds[pair.before], news[pair.after]];
  const words =
    pair.kind === "changed" ? changedWords(old, now, pair.numbers) : [old && tokens(old), now && tokens(now)];
  const line = (position) => element("td", { class: "number" }, position === undefined ? "" : String(position + 1));
  const cell = (kind, content) => element("td", { class: content ? `line ${kind}` : "line none" }, content ?? "");
  if (chosenPair.mode === "split") {
    const [left, right] = pair.kind === "changed" ? ["removed", "added"] : [pair.kind, pair.kind];
    return [element("tr", {}, line(pair.before), cell(left, words[0]), line(pair.after), cell(right, words[1]))];
  }
  const row = (kind, content, before, after) =>
    element(
      "tr",
      {},
      line(before),
      line(after),
      element("td", { class: `sign ${kind}` }, { removed: "−", added: "+" }[kind] ?? ""),
      cell(kind, content),
    );
  if (pair.kind === "changed")
    return [row("removed", words[0], pair.before, undefined), row("added", words[1], undefined, pair.after)];
  return [row(pair.kind, words[0] ?? words[1], pair.before, pair.after)];
}

// The two forms of a changed line, with the words that differ marked; a value that was only renumbered does not.
function changedWords(old, now, numbers) {
  const split = (line) => line.match(/%\d+|\$\d+|[\w.]+(?:::[\w.]+)?|\s+|[^\s\w]/g) ?? [];
  const [before, after] = [split(old), split(now)];
  const parts = jsdiff.diffArrays(
    before.map((word) => numbers.get(word) ?? word),
    after,
  );
  const sides = [[], []];
  const at = [0, 0];
  for (const part of parts) {
    [before, after].forEach((words, side) => {
      if (side === 0 ? part.added : part.removed) return;
      const text_ = words.slice(at[side], at[side] + part.count).join("");
      at[side] += part.count;
      sides[side].push(part.added || part.removed ? element("mark", {}, text_) : element("span", {}, tokens(text_)));
    });
  }
  return sides;
}
