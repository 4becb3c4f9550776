// Tables that are sorted by any column and filtered by words.

const ROWS_AT_ONCE = 100;

// Columns: { title, value(row) to sort by, cell(row) to show, numeric, hint, down: sort from large to small first }.
function sortableTable({ label, columns, rows, sortBy, filter, rowClass, onRow }) {
  const state = { column: sortBy ?? 0, down: columns[sortBy ?? 0].down ?? false, words: "", all: false };
  const body = element("tbody");
  const rest = div("rest");
  const heads = columns.map((column, position) => {
    const sort = button(
      column.title,
      () => {
        state.down = state.column === position ? !state.down : (column.down ?? Boolean(column.numeric));
        state.column = position;
        draw();
      },
      { title: column.hint },
    );
    return element("th", { scope: "col", class: column.numeric ? "numeric" : "" }, sort);
  });
  const searched = new Map(filter ? rows.map((row) => [row, filter(row).toLowerCase()]) : []);

  function chosen() {
    const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
    const found = words.length ? rows.filter((row) => words.every((word) => searched.get(row).includes(word))) : rows;
    const { value } = columns[state.column];
    const sign = state.down ? -1 : 1;
    return [...found].sort((one, other) => {
      const [a, b] = [value(one), value(other)];
      return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
    });
  }

  function tableRow(row) {
    const cells = columns.map((column) =>
      element("td", { class: column.numeric ? "numeric" : (column.class ?? "") }, column.cell(row)),
    );
    const made = element("tr", { class: rowClass?.(row) ?? "" }, cells);
    if (onRow) {
      made.classList.add("clickable");
      // The button in the row does the same for the keyboard; a selection of text is not a click.
      made.addEventListener("click", (event) => {
        if (!event.target.closest("button, a") && getSelection().isCollapsed) onRow(row);
      });
    }
    return made;
  }

  function draw() {
    heads.forEach((head, position) => {
      if (position === state.column) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const found = chosen();
    const shown = state.all ? found : found.slice(0, ROWS_AT_ONCE);
    body.replaceChildren(...shown.map(tableRow));
    if (!found.length) {
      body.append(element("tr", {}, element("td", { colspan: columns.length, class: "nothing" }, "Nothing matches.")));
    }
    rest.replaceChildren();
    if (shown.length < found.length) {
      rest.append(
        button(
          `Show all ${count(found.length)} rows`,
          () => {
            state.all = true;
            draw();
          },
          { class: "quiet" },
        ),
      );
    }
  }

  const table = element("table", { "aria-label": label }, element("thead", {}, element("tr", {}, heads)), body);
  const search =
    filter && rows.length > 5
      ? element("input", {
          type: "search",
          placeholder: "Filter",
          "aria-label": `Filter: ${label}`,
          oninput: (event) => {
            state.words = event.target.value;
            draw();
          },
        })
      : null;
  draw();
  return div(
    "table",
    search ? div("tools", search) : null,
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table),
    rest,
  );
}

// A figure with a bar behind it: its share of the largest or of the whole.
function shareBar(share, label) {
  const filled = element("span", { class: "filled" });
  filled.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return element("span", { class: "share" }, element("span", { class: "track", "aria-hidden": "true" }, filled), label);
}
