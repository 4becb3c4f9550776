// Beside the timeline: what its colours mean, and the time of the user's thread in each step.

const MOST_BARS = 240;

// What the colours mean, with totals; a click hides a kind.
function legend(hidden, changed) {
  const totals = new Map();
  for (let i = 0; i < spans.length; i += 1) {
    const total = totals.get(spans.kind[i]) ?? { amount: 0, time: 0 };
    total.amount += 1;
    total.time += spans.duration[i];
    totals.set(spans.kind[i], total);
  }
  const item = (kind) => {
    const { amount, time } = totals.get(kind);
    const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = `var(--span-${kind})`;
    return button(
      [swatch, kind, text("faint", `${count(amount)} · ${seconds(time / 1e6)}`)],
      (event) => {
        const hide = !hidden.has(kind);
        event.currentTarget.setAttribute("aria-pressed", String(!hide));
        if (hide) hidden.add(kind);
        else hidden.delete(kind);
        changed();
      },
      { "aria-pressed": "true", title: KIND_MEANING[kind] },
    );
  };
  return element(
    "div",
    { class: "legend", role: "group", "aria-label": "Kinds of spans" },
    KINDS.filter((kind) => totals.has(kind)).map(item),
  );
}

// Bars of one step each; of many steps, each bar is the mean of some.
class StepBars {
  constructor(steps) {
    const together = Math.ceil(steps.length / MOST_BARS);
    this.bars = [];
    for (let at = 0; at < steps.length; at += together) this.bars.push(steps.slice(at, at + together));
    this.kinds = KINDS.filter((kind) => steps.some((step) => step.times[kind]));
  }

  name(bar) {
    return bar.length > 1 ? `${bar[0].number}–${bar.at(-1).number}` : String(bar[0].number);
  }

  mean(bar, kind) {
    return sum(bar, (step) => step.times[kind] ?? 0) / bar.length;
  }

  tip(bar) {
    const parts = this.kinds.map((kind) => [kind, this.mean(bar, kind)]).filter(([, time]) => time > 0);
    const total = sum(parts, ([, time]) => time);
    return div(
      "tip",
      element("strong", {}, `step ${this.name(bar)}${bar.length > 1 ? ", mean" : ""}`),
      facts([...parts.map(([kind, time]) => [kind, seconds(time / 1e6)]), ["together", seconds(total / 1e6)]]),
    );
  }

  options() {
    const colours = inks();
    const axis = plainAxis(colours);
    return {
      ...look(),
      grid: { left: 78, right: 18, top: 12, bottom: 26 },
      tooltip: {
        ...tooltipLook(colours),
        trigger: "axis",
        axisPointer: { type: "shadow" },
        formatter: ([first]) => this.tip(this.bars[first.dataIndex]),
      },
      xAxis: { ...axis, type: "category", data: this.bars.map((bar) => this.name(bar)) },
      yAxis: {
        ...axis,
        type: "value",
        splitNumber: 3,
        axisLine: { show: false },
        axisLabel: { ...axis.axisLabel, formatter: (value) => seconds(value / 1e6) },
      },
      series: this.kinds.map((kind) => ({
        type: "bar",
        name: kind,
        stack: "step",
        barCategoryGap: "20%",
        cursor: "pointer",
        itemStyle: { color: colour(`span-${kind}`) },
        data: this.bars.map((bar) => this.mean(bar, kind)),
      })),
    };
  }
}

function stepChart(steps, toStep) {
  if (steps.length < 2) return null;
  const bars = new StepBars(steps);
  const box = chartBox({ id: "step-chart", role: "img", "aria-label": "Time of your thread in each step" }, 168, {
    draw: (chart) => chart.setOption(bars.options()),
    ready: (chart) => chart.on("click", (event) => toStep(bars.bars[event.dataIndex][0].number)),
  });
  return div(
    "steps",
    element("h3", {}, "Your thread, step by step"),
    note("Time on the user lane; a span inside another is counted once. A click shows the step above."),
    div("card flush", box),
  );
}
