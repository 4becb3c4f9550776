// Findings, key figures, and the ledgers: compilations, syncs, fallbacks, settings, metrics.

const SEVERITIES = ["error", "warning", "hint"];
const FINDINGS_AT_ONCE = 6;

function makeHeading() {
  const command = run.command.join(" ") || "interactive session";
  const backend = (run.settings.find((setting) => setting.name === "backend")?.value ?? "").replace(/^'(.*)'$/, "$1");
  const facts_ = [
    run.started.replace("T", " ").slice(0, 19),
    `ran ${seconds(run.duration_s)}`,
    plural(run.steps, "step"),
    backend ? `backend ${backend}` : "",
  ];
  return element(
    "header",
    { class: "title" },
    element("h1", { title: command }, command),
    element("p", {}, facts_.filter(Boolean).join("  ·  ")),
  );
}

function makeFigures() {
  const compiled = run.compiles.filter((row) => !row.loaded);
  const cut = run.syncs.filter((row) => row.kind === "sync");
  const waited = sum(run.syncs, (row) => row.wait_s);
  const fallbacks = sum(run.fallbacks, (row) => row.count);
  const perStep = (amount) => (run.steps && amount ? `${digits(amount / run.steps)} a step` : "");
  const figures = [
    ["Steps", count(run.steps), run.steps ? `${seconds(run.duration_s / run.steps)} each` : ""],
    [
      "Programs",
      count(run.programs.length),
      plural(
        sum(run.programs, (row) => row.runs),
        "run",
      ),
    ],
    [
      "Compiles",
      count(compiled.length),
      run.compiles.length > compiled.length ? `${count(run.compiles.length - compiled.length)} loaded` : "",
    ],
    ["Compile time", seconds(sum(compiled, (row) => row.duration_s)), ""],
    ["Syncs", count(sum(cut, (row) => row.count)), perStep(sum(cut, (row) => row.count))],
    ["Time waited", seconds(waited), run.duration_s ? `${percent(waited / run.duration_s)} of the run` : ""],
    ["Fallbacks", count(fallbacks), perStep(fallbacks)],
    ["Peak memory", bytes(run.memory.peak_bytes), `${bytes(run.memory.current_bytes)} now`],
  ];
  return element(
    "dl",
    { class: "figures", "aria-label": "Key figures" },
    figures.map(([name, value, more]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value, more ? text("faint", more) : null)),
    ),
  );
}

function makeFindings() {
  const rank = (finding) => [SEVERITIES.indexOf(finding.severity), -finding.cost_s];
  const sorted = [...run.findings].sort((a, b) => rank(a)[0] - rank(b)[0] || rank(a)[1] - rank(b)[1]);
  const counts = SEVERITIES.map((name) => [name, sorted.filter((finding) => finding.severity === name).length]).filter(
    ([, amount]) => amount,
  );
  const subtitle = counts.map(([name, amount]) => plural(amount, name)).join(", ");
  if (!sorted.length) return section("findings", "Findings", "", empty("The doctor found nothing to change."));
  const cards = div("findings", sorted.slice(0, FINDINGS_AT_ONCE).map(findingCard));
  const rest = sorted.slice(FINDINGS_AT_ONCE);
  const more = rest.length
    ? button(
        `Show ${plural(rest.length, "more finding")}`,
        (event) => {
          cards.append(...rest.map(findingCard));
          event.target.remove();
        },
        { class: "quiet more" },
      )
    : null;
  return section("findings", "Findings", subtitle, cards, more);
}

function findingCard(finding) {
  return element(
    "article",
    { class: `card finding ${SEVERITIES.includes(finding.severity) ? finding.severity : "hint"}` },
    div(
      "card-head",
      text("severity", finding.severity),
      element("span", { class: "faint", title: `rule ${finding.rule}` }, finding.code),
    ),
    element("h3", {}, finding.title),
    element("p", {}, finding.evidence),
    finding.fix ? element("p", { class: "fix" }, element("strong", {}, "Fix "), finding.fix) : null,
    div(
      "card-foot",
      place(finding.source),
      finding.cost_s > 0 ? text("faint", `costs up to ${seconds(finding.cost_s)}`) : null,
    ),
  );
}

function makeCompiles() {
  const subtitle = "Every compilation and load, with the reason why what was known did not fit.";
  if (!run.compiles.length)
    return section(
      "compiles",
      "Recompiles",
      subtitle,
      empty("No compilations: no program was seen often enough, or none was synced."),
    );
  const why = (row) => row.explanation;
  const columns = [
    {
      title: "At",
      value: (row) => row.begin_s,
      cell: (row) => seconds(row.begin_s),
      numeric: true,
      hint: "Time since the start",
    },
    { title: "Program", value: (row) => row.program, cell: (row) => programLink(row.program) },
    {
      title: "Cause",
      value: (row) => `${why(row).code} ${why(row).cause}`,
      cell: (row) => [text("tag", why(row).code), ` ${why(row).cause}`],
      class: "cause",
    },
    {
      title: "What differed",
      value: (row) => why(row).difference,
      class: "prose",
      cell: (row) => reasonCell(why(row)),
    },
    { title: "Line", value: (row) => shortPlace(source(why(row).source)), cell: (row) => place(why(row).source) },
    {
      title: "No.",
      value: (row) => row.number,
      cell: (row) => count(row.number),
      numeric: true,
      down: true,
      hint: "Counts the compilations at one site",
    },
    { title: "Step", value: (row) => row.step, cell: (row) => count(row.step), numeric: true },
    {
      title: "Took",
      value: (row) => row.duration_s,
      cell: (row) => seconds(row.duration_s),
      numeric: true,
      down: true,
    },
    {
      title: "Backend",
      value: (row) => row.backend,
      cell: (row) =>
        [
          row.backend,
          row.loaded ? text("tag", "loaded") : null,
          row.elsewhere ? text("tag", "other process") : null,
        ].filter(Boolean),
    },
  ];
  return section(
    "compiles",
    "Recompiles",
    subtitle,
    causesTable(),
    element("h3", {}, "One by one"),
    sortableTable({
      label: "Compilations",
      columns,
      rows: run.compiles,
      sortBy: 0,
      filter: (row) =>
        [
          `#${row.program}`,
          why(row).code,
          why(row).cause,
          why(row).difference,
          longPlace(source(why(row).source)),
          row.backend,
        ].join(" "),
    }),
  );
}

function reasonCell(explanation) {
  return div(
    "reason",
    element("div", {}, explanation.difference || "new program"),
    explanation.promoted ? element("div", { class: "faint" }, `Now an input: ${explanation.promoted}`) : null,
    differenceButton(explanation),
  );
}

// The causes, with what to do about each once, and not at each of a hundred rows.
function causesTable() {
  const causes = new Map();
  for (const { explanation, duration_s: took } of run.compiles) {
    const key = `${explanation.code} ${explanation.cause} ${explanation.advice}`;
    const row = causes.get(key) ?? { ...explanation, amount: 0, took: 0 };
    row.amount += 1;
    row.took += took;
    causes.set(key, row);
  }
  return sortableTable({
    label: "Causes",
    rows: [...causes.values()],
    sortBy: 2,
    columns: [
      { title: "Cause", value: (row) => row.code, cell: (row) => [text("tag", row.code), ` ${row.cause}`] },
      figure("Compiles", (row) => row.amount, count),
      figure("Took", (row) => row.took, seconds),
      {
        title: "What to do",
        value: (row) => row.advice,
        cell: (row) => row.advice || text("faint", "–"),
        class: "prose wide",
      },
    ],
  });
}

function makeSyncs() {
  const subtitle = "Each line that cut the pending program or read a value, and what that cost your thread.";
  if (!run.syncs.length)
    return section("syncs", "Sync ledger", subtitle, empty("No syncs: nothing was cut and nothing was read."));
  const whole = sum(run.syncs, (row) => row.wait_s) || 1;
  const columns = [
    { title: "Line", value: (row) => longPlace(source(row.source)), cell: (row) => place(row.source) },
    {
      title: "Kind",
      value: (row) => row.kind,
      cell: (row) => text(`tag kind-${row.kind === "read" ? "read" : "sync"}`, row.kind),
    },
    { title: "Reason", value: (row) => row.reason, cell: (row) => row.reason, class: "prose" },
    figure("Count", (row) => row.count, count),
    figure("A step", (row) => (run.steps ? row.count / run.steps : 0), digits, "Times in each step, on average"),
    figure("Waited", (row) => row.wait_s, seconds, "Time that your thread stood still"),
    {
      title: "Share",
      value: (row) => row.wait_s,
      cell: (row) => shareBar(row.wait_s / whole, percent(row.wait_s / whole)),
      down: true,
      hint: "Share of all waiting",
    },
    figure("Copied", (row) => row.size_bytes, bytes),
    {
      title: "Programs",
      value: (row) => row.programs.length,
      down: true,
      class: "links",
      cell: (row) => linkList(row.programs),
    },
  ];
  return section(
    "syncs",
    "Sync ledger",
    subtitle,
    sortableTable({
      label: "Sync ledger",
      columns,
      rows: run.syncs,
      sortBy: 5,
      filter: (row) => `${longPlace(source(row.source))} ${row.kind} ${row.reason}`,
    }),
  );
}

function linkList(identities) {
  const shown = identities.slice(0, 3).map(programLink);
  if (identities.length > shown.length) shown.push(text("faint", `+${count(identities.length - shown.length)}`));
  return shown.length ? shown : [text("faint", "–")];
}

function makeFallbacks() {
  const subtitle = "Operations that ran eagerly; each cuts the program and waits for it.";
  if (!run.fallbacks.length)
    return section("fallbacks", "Fallbacks", subtitle, empty("No fallbacks: every operation was recorded."));
  const columns = [
    { title: "Operation", value: (row) => row.op, cell: (row) => code(row.op) },
    { title: "Line", value: (row) => longPlace(source(row.source)), cell: (row) => place(row.source) },
    { title: "Reason", value: (row) => row.reason, cell: (row) => row.reason, class: "prose" },
    figure("Count", (row) => row.count, count),
    figure("Took", (row) => row.total_s, seconds),
  ];
  return section(
    "fallbacks",
    "Fallbacks",
    subtitle,
    sortableTable({
      label: "Fallbacks",
      columns,
      rows: run.fallbacks,
      sortBy: 4,
      filter: (row) => `${row.op} ${row.reason} ${longPlace(source(row.source))}`,
    }),
  );
}

// What jit functions say of their calls; no section where there are none.
function makeFunctions() {
  if (!run.functions?.length) return [];
  const texts = run.functions.map((text) => element("pre", { class: "scroll", tabindex: "0" }, text));
  const about = "Calls of each function that were recorded and replayed, and why one was recorded again.";
  return [section("functions", "Functions with jit", about, ...texts)];
}

function makeSettings() {
  const changed = run.settings.filter((row) => row.origin !== "default");
  const rest = run.settings.filter((row) => row.origin === "default");
  const table = (rows, label) =>
    element(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
      element(
        "table",
        { "aria-label": label },
        element(
          "thead",
          {},
          element(
            "tr",
            {},
            ["Setting", "Value", "From"].map((title) => element("th", { scope: "col" }, title)),
          ),
        ),
        element(
          "tbody",
          {},
          rows.map((row) =>
            element(
              "tr",
              {},
              element("td", {}, code(row.name)),
              element("td", { class: "prose" }, code(row.value || "''")),
              element(
                "td",
                {},
                row.origin === "default"
                  ? text("faint", "default")
                  : text("tag", { env: "environment" }[row.origin] ?? row.origin),
              ),
            ),
          ),
        ),
      ),
    );
  return section(
    "settings",
    "Settings and versions",
    "",
    element(
      "div",
      { class: "columns" },
      element(
        "div",
        {},
        element("h3", {}, "Settings"),
        changed.length ? table(changed, "Changed settings") : empty("Every setting has its default."),
        rest.length
          ? element(
              "details",
              {},
              element("summary", {}, `${plural(rest.length, "setting")} at the default`),
              table(rest, "Default settings"),
            )
          : null,
      ),
      element(
        "div",
        {},
        element("h3", {}, "Versions"),
        facts(Object.entries(run.versions).map(([name, value]) => [name, code(value)])),
      ),
    ),
  );
}

// Whatever the metrics hold, as a list of names and values.
function flatten(value, name, rows) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, part] of Object.entries(value)) flatten(part, name ? `${name}.${key}` : key, rows);
  } else rows.push({ name, value: Array.isArray(value) ? JSON.stringify(value) : value });
  return rows;
}

function makeMetrics() {
  const rows = flatten(run.metrics, "", []);
  if (!rows.length) return section("metrics", "Metrics", "", empty("No metrics: nothing was counted."));
  const shown = (value) =>
    typeof value === "number"
      ? Number.isInteger(value)
        ? count(value)
        : String(Number(value.toPrecision(6)))
      : String(value);
  return section(
    "metrics",
    "Metrics",
    "Counters and times, by the names that docs/metrics.md explains.",
    sortableTable({
      label: "Metrics",
      rows,
      sortBy: 0,
      filter: (row) => row.name,
      columns: [
        { title: "Name", value: (row) => row.name, cell: (row) => code(row.name) },
        { title: "Value", value: (row) => row.value, cell: (row) => shown(row.value), numeric: true, down: true },
      ],
    }),
  );
}
