// The spans of the timeline: rows without overlaps, what is visible at a zoom, and the time that each step took.

const MOST_ROWS = 8;

const spans = (() => {
  const columns = run.spans;
  const named = (positions) => positions.map((position) => columns.names[position]);
  const { begin, duration, step, program, size } = columns;
  return {
    length: begin.length,
    kind: named(columns.kind),
    lane: named(columns.lane),
    label: named(columns.label),
    begin,
    duration,
    step,
    program,
    size,
    end: begin.map((value, position) => value + duration[position]),
  };
})();

const spansEnd = Math.max(
  run.duration_s * 1e6,
  spans.end.reduce((most, value) => Math.max(most, value), 0),
  1,
);

// Rows of each lane from above; a span goes to the first row that is free, so that a row is in order of time.
function packRows() {
  const rows = [];
  const lanes = [...LANES, ...new Set(spans.lane.filter((lane) => !LANES.includes(lane)))];
  for (const lane of lanes) {
    const members = [];
    for (let i = 0; i < spans.length; i += 1) if (spans.lane[i] === lane) members.push(i);
    members.sort((a, b) => spans.begin[a] - spans.begin[b] || spans.duration[b] - spans.duration[a]);
    const own = [];
    for (const i of members) {
      // Times are rounded to a tenth of a microsecond: neighbours may overlap by that much.
      let row = own.find((candidate) => spans.end[candidate.at(-1)] <= spans.begin[i] + 0.2);
      if (!row && own.length < MOST_ROWS) own.push((row = []));
      (row ?? own.at(-1)).push(i);
    }
    own.forEach((members_, depth) => rows.push({ lane, depth, members: members_ }));
    if (!own.length && LANES.includes(lane)) rows.push({ lane, depth: 0, members: [] });
  }
  return rows;
}

// What to draw of one row between two times: spans that are narrower than `grain` are drawn together, in the colour of
// the kind that takes most of the time. So the work of drawing depends on the window and not on the recording.
function visible(row, from, to, grain, hidden) {
  const { members } = row;
  let low = 0;
  let high = members.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans.end[members[middle]] < from) low = middle + 1;
    else high = middle;
  }
  const blocks = [];
  let open = null;
  for (let at = low; at < members.length; at += 1) {
    const i = members[at];
    if (spans.begin[i] > to) break;
    const kind = spans.kind[i];
    if (hidden.has(kind)) continue;
    const narrow = spans.duration[i] < grain;
    if (open && narrow && spans.end[i] - open.begin < grain * 2) {
      open.end = Math.max(open.end, spans.end[i]);
      open.amount += 1;
      if (spans.duration[i] > spans.duration[open.span]) {
        open.span = i;
        open.kind = kind;
      }
      continue;
    }
    const block = { begin: spans.begin[i], end: spans.end[i], kind, span: i, amount: 1 };
    blocks.push(block);
    open = narrow ? block : null;
  }
  return blocks;
}

// For each step that has spans: when it began and ended, and the user's time by kind, nested spans not counted twice.
function stepTimes(rows) {
  const steps = new Map();
  const own = Float64Array.from(spans.duration);
  const users = rows.filter((row) => row.lane === "user").flatMap((row) => row.members);
  users.sort((a, b) => spans.begin[a] - spans.begin[b] || spans.duration[b] - spans.duration[a]);
  const around = [];
  for (const i of users) {
    while (around.length && spans.end[around.at(-1)] <= spans.begin[i] + 0.2) around.pop();
    if (around.length) own[around.at(-1)] -= Math.min(spans.duration[i], spans.end[around.at(-1)] - spans.begin[i]);
    around.push(i);
    const number_ = spans.step[i];
    let step = steps.get(number_);
    if (!step) steps.set(number_, (step = { number: number_, begin: spans.begin[i], end: 0, times: {} }));
    step.end = Math.max(step.end, spans.end[i]);
  }
  for (const i of users) {
    const { times } = steps.get(spans.step[i]);
    times[spans.kind[i]] = (times[spans.kind[i]] ?? 0) + Math.max(0, own[i]);
  }
  return [...steps.values()].sort((a, b) => a.number - b.number);
}
