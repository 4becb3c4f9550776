// What all charts share: their box, their first drawing, resizing, and the colours of the theme.

const inks = () => ({ ink: colour("ink"), faint: colour("ink-faint"), line: colour("line"), accent: colour("accent") });

const tooltipLook = ({ ink, line }) => ({
  confine: true,
  renderMode: "html",
  borderColor: line,
  backgroundColor: colour("surface"),
  textStyle: { color: ink },
  extraCssText: "box-shadow: 0 4px 16px rgb(0 0 0 / .18)",
});

const plainAxis = ({ faint, line }) => ({
  axisTick: { show: false },
  axisLine: { lineStyle: { color: line } },
  axisLabel: { color: faint, hideOverlap: true },
  splitLine: { lineStyle: { color: line, opacity: 0.5 } },
});

const look = () => ({ animation: false, textStyle: { fontFamily: getComputedStyle(document.body).fontFamily } });

// An element that holds a chart. `draw(chart)` sets its options, `ready(chart)` adds what is done once, and
// `resized(chart)` what a new width asks for. A chart needs a width: it is made when the box has one.
function chartBox(attributes, height, { draw, ready, resized }) {
  const box = element("div", { class: "chart", ...attributes });
  box.style.height = `${height}px`;
  let chart = null;
  onRedraw(() => chart && draw(chart));
  new ResizeObserver(() => {
    if (chart) {
      chart.resize();
      resized?.(chart);
      return;
    }
    chart = charts.init(box, null, { renderer: "canvas" });
    ready?.(chart);
    draw(chart);
  }).observe(box);
  return box;
}
