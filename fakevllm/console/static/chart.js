// Draw the learning curve, and draw it again when the ledger has changed.
(() => {
  "use strict";
  const HEIGHT = 280;
  // Steps are whole numbers, so the axis has no marks between them.
  const STEP_INCREMENTS = [1, 10, 100, 1000, 1e4, 1e5].flatMap((unit) => [unit, 2 * unit, 5 * unit]);
  const box = document.querySelector(".chart");
  if (!box) return;
  let chart = null;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Draw a vertical line at each step before which the hooks or the job changed.
  function drawBreaks(plot, breaks) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("--bad");
    ctx.lineWidth = devicePixelRatio;
    for (const step of breaks) {
      const x = Math.round(plot.valToPos(step, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  function options(breaks) {
    const axis = {
      stroke: colour("--soft"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { stroke: colour("--line"), width: 1 },
    };
    const line = (label, name, style) => ({
      label,
      stroke: colour(name),
      width: 2,
      ...style,
      spanGaps: true,
      value: (_, value) => (value == null ? "–" : value.toFixed(3)),
    });
    return {
      width: box.clientWidth,
      height: HEIGHT,
      hooks: { draw: [(plot) => drawBreaks(plot, breaks)] },
      scales: { x: { time: false } },
      axes: [{ ...axis, incrs: STEP_INCREMENTS }, axis],
      series: [
        { label: "step", value: (_, value) => value ?? "–" },
        line("policy", "--accent", { width: 1, alpha: 0.5 }),
        line("policy, average of ten", "--accent", { points: { show: false } }),
        line("served best", "--second", { dash: [8, 4] }),
      ],
    };
  }

  async function draw() {
    const reply = await fetch(box.dataset.source);
    if (!reply.ok) return;
    const points = await reply.json();
    const column = (name) => points.map((point) => point[name]);
    const names = ["first_step", "policy_mean", "policy_average", "returned_best"];
    const data = names.map(column);
    if (chart) chart.destroy();
    chart = null;
    // A box that is hidden has no width, so it is shown before the chart is made.
    box.hidden = points.length === 0;
    if (box.hidden) return;
    const breaks = points.filter((point) => point.changed).map((point) => point.first_step);
    chart = new uPlot(options(breaks), data, box);
  }

  // live.js limits how often this event comes.
  document.body.addEventListener("ledger", draw);
  window.addEventListener("resize", () => {
    if (chart) chart.setSize({ width: box.clientWidth, height: HEIGHT });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
