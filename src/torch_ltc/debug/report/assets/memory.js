// Memory over time, and which lines made what is alive.

function makeMemory() {
  const { samples, largest, physical, peak_bytes: peak, current_bytes: current } = run.memory;
  const entries = Object.entries(physical);
  return section(
    "memory",
    "Memory",
    `Buffers of the device: ${bytes(current)} now, ${bytes(peak)} at most.`,
    samples.length > 1
      ? div("card flush", memoryChart(samples, peak))
      : empty("No samples: too little ran to draw memory over time."),
    element("h3", {}, "Largest live buffers, by the line that made them"),
    largest.length ? buffersTable(largest, current || 1) : empty("No buffers are alive."),
    element("h3", {}, "Physical device"),
    entries.length
      ? facts(
          entries.map(([name, value]) => [
            name.replace(/[._]/g, " "),
            name.includes("count") ? count(value) : bytes(value),
          ]),
        )
      : empty("The physical device says nothing about its memory."),
  );
}

function buffersTable(rows, whole) {
  return sortableTable({
    label: "Largest live buffers",
    rows,
    sortBy: 3,
    columns: [
      { title: "Line", value: (row) => longPlace(source(row.source)), cell: (row) => place(row.source) },
      { title: "Operation", value: (row) => row.op, cell: (row) => code(row.op || "–") },
      figure("Buffers", (row) => row.count, count),
      figure("Size", (row) => row.size_bytes, bytes),
      {
        title: "Share",
        value: (row) => row.size_bytes,
        down: true,
        cell: (row) => shareBar(row.size_bytes / whole, percent(row.size_bytes / whole)),
      },
    ],
  });
}

function memoryChart(samples, peak) {
  // Ticks at round numbers of bytes, which are powers of two.
  const interval = 2 ** Math.max(0, Math.ceil(Math.log2(Math.max(peak, 1) / 5)));
  const options = () => {
    const colours = inks();
    const axis = plainAxis(colours);
    const { faint, accent } = colours;
    return {
      ...look(),
      grid: { left: 78, right: 18, top: 18, bottom: 28 },
      tooltip: {
        ...tooltipLook(colours),
        trigger: "axis",
        formatter: ([{ value }]) =>
          div("tip", element("strong", {}, bytes(value[1])), text("tip-hint", `at ${seconds(value[0])}`)),
      },
      xAxis: {
        ...axis,
        type: "value",
        min: samples[0][0],
        max: samples.at(-1)[0],
        splitLine: { show: false },
        axisLabel: { ...axis.axisLabel, formatter: seconds, showMinLabel: false, showMaxLabel: false },
      },
      yAxis: {
        ...axis,
        type: "value",
        min: 0,
        max: Math.ceil(Math.max(peak, 1) / interval) * interval,
        interval,
        axisLine: { show: false },
        axisLabel: { ...axis.axisLabel, formatter: (value) => bytes(value) },
      },
      series: [
        {
          type: "line",
          step: "end",
          data: samples,
          symbol: "none",
          sampling: "max",
          lineStyle: { color: accent, width: 1.5 },
          areaStyle: { color: accent, opacity: 0.15 },
          markLine: {
            symbol: "none",
            silent: true,
            lineStyle: { color: faint, type: "dashed" },
            data: [{ yAxis: peak }],
            label: { color: faint, formatter: () => `peak ${bytes(peak)}`, position: "insideStartTop" },
          },
        },
      ],
    };
  };
  return chartBox({ id: "memory-chart", role: "img", "aria-label": `Memory over time, at most ${bytes(peak)}` }, 220, {
    draw: (chart) => chart.setOption(options()),
  });
}
