// The table of programs, and the one that was chosen in it.

const detail = element("div", { class: "detail", id: "program-detail", tabindex: "-1" });

function makePrograms() {
  if (!run.programs.length) return section("programs", "Programs", "", empty("No programs: nothing was synced."));
  const columns = [
    { title: "Program", value: (row) => row.identity, numeric: false, cell: (row) => programLink(row.identity) },
    { title: "Synced at", value: (row) => shortPlace(source(row.site)), cell: (row) => place(row.site) },
    figure("Calls", (row) => row.calls, count, "Operations in it"),
    figure("In", (row) => row.inputs, count, "Inputs"),
    figure("Out", (row) => row.outputs, count, "Outputs"),
    figure(
      "Syncs",
      (row) => row.syncs,
      count,
      "How often it was recorded and cut; all but the first found it in the cache",
    ),
    figure("Runs", (row) => row.runs, count, "How often it ran"),
    figure("Interp.", (row) => row.interpreted, count, "Runs in the interpreter, among all"),
    figure("Compiles", (row) => row.compiles, count, "How often a backend compiled it"),
    figure("Record", (row) => row.record_s, seconds, "Time from its first call to its sync, all syncs together"),
    figure("Compile", (row) => row.compile_s, seconds, "Time in the compiler"),
    figure("Run", (row) => row.run_s, seconds, "Time on the worker"),
    {
      title: "Backend",
      value: (row) => row.backend,
      cell: (row) =>
        [
          row.backend || "–",
          row.refused ? text("tag bad", "refused") : null,
          row.failed ? text("tag bad", "failed") : null,
        ].filter(Boolean),
    },
  ];
  const busiest = run.programs.reduce((most, row) => (row.run_s > most.run_s ? row : most));
  const table = sortableTable({
    label: "Programs",
    columns,
    rows: run.programs,
    sortBy: 11,
    onRow: (row) => showProgram(row.identity, false),
    filter: (row) => `#${row.identity} ${longPlace(source(row.site))} ${row.backend} ${row.reason}`,
    rowClass: (row) => `program-${row.identity}`,
  });
  queueMicrotask(() => showProgram(busiest.identity, false));
  return section(
    "programs",
    "Programs",
    "Each piece of work that was cut from your code and run as one. A row shows its text below.",
    run.dropped_programs
      ? note(`The text of ${plural(run.dropped_programs, "program")} was dropped to bound memory.`)
      : null,
    table,
    detail,
  );
}

const figure = (title, value, shown, hint) => ({
  title,
  value,
  hint,
  numeric: true,
  down: true,
  cell: (row) => (value(row) ? shown(value(row)) : text("faint", "0")),
});

function showProgram(identity, scroll = true) {
  const program = programs.get(identity);
  for (const row of document.querySelectorAll("#programs tr.chosen")) row.classList.remove("chosen");
  document.querySelector(`#programs tr.program-${identity}`)?.classList.add("chosen");
  detail.replaceChildren(
    div(
      "detail-heading",
      element("h3", {}, `Program ${programTitle(identity)}`),
      programs.size > 1
        ? button("Compare with another", () => compare(program.explanation?.nearest || 0, identity), { class: "quiet" })
        : null,
    ),
    facts([
      ["first call", place(program.first)],
      ["synced", element("span", {}, place(program.site), program.reason ? text("faint", `, ${program.reason}`) : "")],
      ["calls", count(program.calls)],
      [
        "runs",
        [
          count(program.runs),
          program.interpreted ? `${count(program.interpreted)} interpreted` : "",
          program.failed ? `${count(program.failed)} failed` : "",
        ]
          .filter(Boolean)
          .join(", "),
      ],
      ["a run takes", runTimes(program)],
      ["chosen", program.choice ?? ""],
      ["its code", program.remark ?? ""],
      ["graphs", program.capture ?? ""],
      ["a recording takes", program.syncs ? seconds(program.record_s / program.syncs) : ""],
      [
        "compiled",
        program.compiles || program.loads
          ? `${plural(program.compiles, "time")} in ${seconds(program.compile_s)}, loaded ${plural(program.loads, "time")}`
          : "",
      ],
    ]),
    ...(program.explanation ? [explanationCard(program.explanation)] : []),
    ...(program.refused
      ? [div("card bad", element("strong", {}, "The backend refused it"), element("pre", {}, program.refused))]
      : []),
    listing(program),
  );
  if (scroll) {
    goTo(detail);
    detail.focus({ preventScroll: true });
  }
}

function runTimes({ runs, interpreted, run_s: all, interpreted_s: slow, backend }) {
  if (!interpreted || !slow || interpreted === runs) return runs ? seconds(all / runs) : "";
  const compiled = (all - slow) / (runs - interpreted);
  return `${seconds(compiled)} on ${backend}, ${seconds(slow / interpreted)} interpreted`;
}

// The id, the cause and the line, and what differs.
function explanationHead(explanation) {
  return [
    div(
      "card-title",
      text("tag", explanation.code),
      element("strong", {}, explanation.cause),
      place(explanation.source),
    ),
    explanation.difference ? element("p", {}, explanation.difference) : null,
  ];
}

// Why it was new or compiled again, with the way to the difference.
function explanationCard(explanation) {
  return div(
    "card explanation",
    ...explanationHead(explanation),
    explanation.promoted ? element("p", {}, text("faint", "Now an input: "), explanation.promoted) : null,
    explanation.advice ? element("p", {}, text("faint", "Try: "), explanation.advice) : null,
    differenceButton(explanation),
  );
}

function differenceButton({ nearest, program }) {
  if (!nearest || nearest === program || !programs.has(nearest) || !programs.has(program)) return null;
  return button(`Compare ${programTitle(nearest)} with ${programTitle(program)}`, () => compare(nearest, program), {
    class: "link",
  });
}
