// The timeline: one chart of every span, zoomed and moved by mouse, buttons and keys.

const ROW_HEIGHT = 22;
// How far apart, in pixels, lines between steps and their labels are at least.
const STEP_LINE_GAP = 8;
const STEP_LABEL_GAP = 64;
const LEAST_WIDTH_US = 10;

class Timeline {
  constructor() {
    this.rows = packRows();
    this.steps = stepTimes(this.rows);
    this.hidden = new Set();
    this.view = firstView();
    this.palette = {};
    this.chart = null;
    // A zoom of ours must not be answered as one of the user's.
    this.quiet = false;
    this.box = chartBox(
      {
        id: "timeline-chart",
        tabindex: "0",
        role: "application",
        "aria-label": "Timeline. Arrow keys move it, plus and minus zoom, 0 shows everything.",
      },
      this.rows.length * ROW_HEIGHT + 92,
      {
        draw: () => this.draw(),
        ready: (chart) => this.ready(chart),
        resized: () => this.update(),
      },
    );
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.shown = text("shown", "");
    this.stepInput = element("input", {
      type: "number",
      min: this.steps[0]?.number ?? 0,
      max: this.steps.at(-1)?.number ?? 0,
      value: this.steps[0]?.number ?? 0,
      "aria-label": "Step",
      onchange: (event) => this.toStep(Number(event.target.value)),
    });
  }

  ready(chart) {
    this.chart = chart;
    chart.on("datazoom", () => {
      if (this.quiet) return;
      const { startValue, endValue } = chart.getOption().dataZoom[0];
      this.view = { from: startValue, to: endValue };
      this.update();
    });
    chart.on("click", ({ data }) => {
      const identity = data?.kind ? spans.program[data.span] : 0;
      if (programs.has(identity)) showProgram(identity);
    });
    // For tests, and for whoever looks at the page with the browser's own tools.
    window.reportTimeline = this;
  }

  draw() {
    this.palette = Object.fromEntries(KINDS.map((kind) => [kind, colour(`span-${kind}`)]));
    this.chart.setOption(this.options());
    this.zoom(this.view.from, this.view.to);
  }

  // What depends on the part of the time that is seen.
  update() {
    this.chart.setOption({ series: [{ data: this.blocks(), markLine: { data: this.stepLines() } }] });
    this.shown.textContent = `${seconds(this.view.from / 1e6)} to ${seconds(this.view.to / 1e6)}`;
  }

  // Microseconds of a pixel.
  grain() {
    return (this.view.to - this.view.from) / Math.max(200, this.box.clientWidth - 110);
  }

  blocks() {
    const { from, to } = this.view;
    const grain = this.grain();
    return this.rows.flatMap((row, position) =>
      visible(row, from, to, grain, this.hidden).map((block) => ({
        value: [block.begin, block.end, position],
        kind: block.kind,
        span: block.span,
        amount: block.amount,
        itemStyle: { color: this.palette[block.kind] },
      })),
    );
  }

  stepLines() {
    const pixel = this.grain();
    let [line, label] = [-Infinity, -Infinity];
    const lines = [];
    for (const step of this.steps) {
      if (step.begin < this.view.from || step.begin > this.view.to || step.begin < line) continue;
      line = step.begin + STEP_LINE_GAP * pixel;
      const show = step.begin >= label;
      if (show) label = step.begin + STEP_LABEL_GAP * pixel;
      lines.push({
        xAxis: step.begin,
        label: { show, formatter: `step ${step.number}`, position: "start", distance: 4 },
      });
    }
    return lines;
  }

  options() {
    const colours = inks();
    const axis = plainAxis(colours);
    const { ink, faint, line, accent } = colours;
    return {
      ...look(),
      grid: { left: 78, right: 18, top: 26, bottom: 62 },
      tooltip: { ...tooltipLook(colours), trigger: "item", formatter: ({ data }) => (data?.kind ? spanTip(data) : "") },
      xAxis: {
        ...axis,
        type: "value",
        min: 0,
        max: spansEnd,
        axisLabel: {
          ...axis.axisLabel,
          formatter: (value) => this.axisTime(value),
          showMinLabel: false,
          showMaxLabel: false,
        },
      },
      yAxis: {
        type: "category",
        inverse: true,
        data: this.rows.map((_, position) => String(position)),
        axisLine: { show: false },
        axisTick: { show: false },
        axisLabel: {
          color: ink,
          interval: 0,
          formatter: (position) => (this.rows[position].depth === 0 ? this.rows[position].lane : ""),
        },
        splitLine: {
          show: true,
          interval: (position) => this.rows[position + 1]?.depth === 0,
          lineStyle: { color: line },
        },
      },
      dataZoom: [
        // A plain wheel scrolls the page, as anywhere else on it.
        { id: "inside", type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false },
        {
          id: "slider",
          type: "slider",
          filterMode: "none",
          height: 20,
          bottom: 8,
          showDetail: false,
          moveHandleSize: 0,
          showDataShadow: false,
          brushSelect: false,
          borderColor: line,
          fillerColor: colour("accent-wash"),
          handleStyle: { color: accent },
          backgroundColor: "transparent",
        },
      ],
      series: [
        {
          type: "custom",
          renderItem: drawSpan,
          encode: { x: [0, 1], y: 2 },
          data: [],
          cursor: "pointer",
          clip: true,
          markLine: {
            symbol: "none",
            silent: true,
            animation: false,
            data: [],
            lineStyle: { color: faint, type: "dotted", width: 1, opacity: 0.7 },
            label: { color: faint, fontSize: 10.5 },
          },
        },
      ],
    };
  }

  axisTime(value) {
    const [unit, name] = this.view.to >= 1e6 ? [1e6, "s"] : this.view.to >= 1e3 ? [1e3, "ms"] : [1, "µs"];
    // As many decimals as it takes to tell one of about eight labels from the next.
    const decimals = Math.ceil(Math.log10((8 * unit) / (this.view.to - this.view.from)));
    return `${(value / unit).toFixed(Math.min(Math.max(decimals, 0), 7))} ${name}`;
  }

  zoom(from, to) {
    const width = Math.min(Math.max(to - from, LEAST_WIDTH_US), spansEnd);
    const begin = Math.min(Math.max(0, from), spansEnd - width);
    this.view = { from: begin, to: begin + width };
    this.quiet = true;
    this.chart.dispatchAction({ type: "dataZoom", startValue: this.view.from, endValue: this.view.to });
    this.quiet = false;
    this.update();
  }

  scale(factor) {
    const middle = (this.view.from + this.view.to) / 2;
    const half = ((this.view.to - this.view.from) / 2) * factor;
    this.zoom(middle - half, middle + half);
  }

  shift(share) {
    const by = share * (this.view.to - this.view.from);
    this.zoom(this.view.from + by, this.view.to + by);
  }

  toStep(wanted) {
    const step = this.steps.find(({ number: own }) => own >= wanted) ?? this.steps.at(-1);
    if (!step) return;
    this.stepInput.value = step.number;
    const margin = Math.max((step.end - step.begin) * 0.06, LEAST_WIDTH_US);
    this.zoom(step.begin - margin, step.end + margin);
  }

  nextStep(by) {
    const at = this.steps.findIndex(({ number: own }) => own >= Number(this.stepInput.value));
    const to = this.steps[Math.min(Math.max(at + by, 0), this.steps.length - 1)];
    if (to) this.toStep(to.number);
  }

  key(event) {
    const actions = {
      ArrowLeft: () => this.shift(-0.25),
      ArrowRight: () => this.shift(0.25),
      "+": () => this.scale(0.5),
      "=": () => this.scale(0.5),
      "-": () => this.scale(2),
      0: () => this.zoom(0, spansEnd),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  tools() {
    return div(
      "tools",
      div(
        "group",
        button("−", () => this.scale(2), { "aria-label": "Zoom out" }),
        button("+", () => this.scale(0.5), { "aria-label": "Zoom in" }),
        button("All", () => this.zoom(0, spansEnd)),
      ),
      div(
        "group",
        button("‹", () => this.nextStep(-1), { "aria-label": "Step before" }),
        element("label", {}, "step ", this.stepInput),
        button("›", () => this.nextStep(1), { "aria-label": "Next step" }),
      ),
      this.shown,
    );
  }
}

// From the first recording to the last span: before and after, Python starts and ends, often for longer than all the
// rest.
function firstView() {
  const first = spans.kind.indexOf("record");
  const from = first < 0 ? 0 : spans.begin[first];
  const to = spans.end.reduce((most, value) => Math.max(most, value), 0);
  const margin = 0.01 * (to - from);
  return { from: Math.max(0, from - margin), to: Math.min(spansEnd, to + margin) };
}

// One span as a rectangle, cut to the part that is seen: canvases do not like rectangles of a million pixels.
function drawSpan({ coordSys: area }, api) {
  const [left, middle] = api.coord([api.value(0), api.value(2)]);
  const [right] = api.coord([api.value(1), api.value(2)]);
  const height = Math.min(18, api.size([0, 1])[1] * 0.78);
  const x = Math.max(left, area.x);
  const end = Math.min(Math.max(right, left + 1), area.x + area.width);
  if (end <= x) return undefined;
  return {
    type: "rect",
    shape: { x, y: middle - height / 2, width: Math.max(end - x, 0.6), height, r: end - x > 6 ? 2 : 0 },
    style: { fill: api.visual("color") },
  };
}

function spanTip({ span, amount }) {
  const size = spans.size[span];
  const identity = spans.program[span];
  return div(
    "tip",
    element("strong", {}, spans.kind[span], amount > 1 ? ` and ${count(amount - 1)} more: zoom in` : ""),
    facts([
      ["program", identity ? programTitle(identity) : ""],
      ["what", spans.label[span]],
      ["took", seconds(spans.duration[span] / 1e6)],
      ["at", `${seconds(spans.begin[span] / 1e6)}, step ${count(spans.step[span])}`],
      ["bytes", size ? bytes(size) : ""],
    ]),
    programs.has(identity) ? text("tip-hint", "Click to show the program") : null,
  );
}

function makeTimeline() {
  if (!spans.length) return section("timeline", "Timeline", "", empty("No spans: nothing was recorded."));
  const timeline = new Timeline();
  return section(
    "timeline",
    "Timeline",
    "What each thread did, and when. Drag to move, Ctrl and wheel to zoom, click a span to see its program.",
    run.dropped_spans
      ? note(`The oldest ${plural(run.dropped_spans, "span")} are not kept; figures elsewhere count everything.`)
      : null,
    run.gaps ? note(`On the worker: ${run.gaps}.`) : null,
    legend(timeline.hidden, () => timeline.update()),
    timeline.tools(),
    div("card flush", timeline.box),
    stepChart(timeline.steps, (step) => timeline.toStep(step)),
  );
}
