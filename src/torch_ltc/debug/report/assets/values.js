// The recording, and how its values read as text.

const run = JSON.parse(document.getElementById("data").textContent);

const KINDS = ["record", "sync", "wait", "copy", "upload", "fallback", "run", "compile", "load"];
const LANES = ["user", "worker", "compiler"];
const KIND_MEANING = {
  record: "your code records operations",
  sync: "a program is cut and queued",
  wait: "your thread stands still until a value is there",
  copy: "a value leaves the device",
  upload: "a tensor is copied to the device",
  fallback: "an operation runs eagerly",
  run: "a program runs",
  compile: "a backend compiles a program",
  load: "a compiled program is loaded from disk",
};

const programs = new Map(run.programs.map((program) => [program.identity, program]));

const number = new Intl.NumberFormat("en-US");
const count = (value) => number.format(value);

function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2);
}

function seconds(value) {
  if (!value) return "0";
  if (value < 1e-3) return `${digits(value * 1e6)} µs`;
  if (value < 1) return `${digits(value * 1e3)} ms`;
  if (value < 120) return `${digits(value)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 120
    ? `${minutes} min ${Math.round(value % 60)} s`
    : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${digits(value)} ${units[unit]}`;
}

const percent = (share) => `${digits(100 * share)} %`;
const plural = (amount, word, many = `${word}s`) => `${count(amount)} ${amount === 1 ? word : many}`;
const sum = (rows, value) => rows.reduce((total, row) => total + value(row), 0);

// A source of the table, as an object; -1 and an empty file are "unknown".
function source(position) {
  const row = run.sources[position];
  if (!row || !row[0]) return null;
  const [file, line, name, backward, module, forward] = row;
  return { file, line, name, backward, module, forward: source(forward), key: `${file}:${line}` };
}

const baseName = (file) => file.split(/[\\/]/).pop() || file;
const shortPlace = (place) => (place ? `${baseName(place.file)}:${place.line}` : "unknown line");
const longPlace = (place) =>
  place ? `${place.file}:${place.line} in ${place.name}${place.backward ? " (in its backward)" : ""}` : "unknown line";

function programTitle(identity) {
  return `#${identity}`;
}
