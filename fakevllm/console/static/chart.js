// Draw the learning curve with the results on held-out rows, and draw it again when the ledger has changed.
(() => {
  "use strict";
  const HEIGHT = 280;
  // Steps are whole numbers, so the axis has no marks between them.
  const STEP_INCREMENTS = [1, 10, 100, 1000, 1e4, 1e5].flatMap((unit) => [unit, 2 * unit, 5 * unit]);
  const box = document.querySelector(".chart");
  if (!box) return;
  let chart = null;
  let points = [];
  // The marks of the last chart, as JSON.
  let drawnMarks = "";

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function drawLine(ctx, x, from, to) {
    ctx.beginPath();
    ctx.moveTo(x, from);
    ctx.lineTo(x, to);
    ctx.stroke();
  }

  // Draw a vertical line at each step before which the hooks or the job changed, with a text that says what changed.
  function drawBreaks(plot, breaks) {
    const { ctx, bbox } = plot;
    ctx.strokeStyle = ctx.fillStyle = colour("--bad");
    ctx.lineWidth = devicePixelRatio;
    ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "bottom";
    for (const { first_step: step, changed } of breaks) {
      const x = Math.round(plot.valToPos(step, "x", true));
      drawLine(ctx, x, bbox.top, bbox.top + bbox.height);
      // The text stands along the line, because a phone has no room beside it.
      ctx.save();
      ctx.translate(x - 3 * devicePixelRatio, bbox.top + 4 * devicePixelRatio);
      ctx.rotate(-Math.PI / 2);
      ctx.fillText(changed, 0, 0);
      ctx.restore();
    }
  }

  // Draw the confidence interval of each result on held-out rows.
  function drawIntervals(plot, marks) {
    const { ctx } = plot;
    ctx.strokeStyle = colour("--ink");
    ctx.lineWidth = devicePixelRatio;
    for (const { step, low, high } of marks) {
      drawLine(ctx, Math.round(plot.valToPos(step, "x", true)), plot.valToPos(low, "y", true), plot.valToPos(high, "y", true));
    }
  }

  function drawMarks(plot, breaks, marks) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    drawBreaks(plot, breaks);
    drawIntervals(plot, marks);
    ctx.restore();
  }

  // The page has the results on held-out rows as JSON, oldest first. A newer result of the same step replaces an older one.
  function heldOutMarks(json) {
    return [...new Map(JSON.parse(json).map((mark) => [mark.step, mark])).values()];
  }

  const marksJson = () => document.getElementById("held-out")?.dataset.marks ?? "[]";

  function options(breaks, marks) {
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
      hooks: { draw: [(plot) => drawMarks(plot, breaks, marks)] },
      scales: {
        x: { time: false },
        y: {
          // The intervals must fit into the chart.
          range: (_, min, max) => uPlot.rangeNum(
            Math.min(min ?? 0, ...marks.map((mark) => mark.low)),
            Math.max(max ?? 1, ...marks.map((mark) => mark.high)),
            0.1,
            true,
          ),
        },
      },
      axes: [{ ...axis, incrs: STEP_INCREMENTS }, axis],
      series: [
        { label: "step", value: (_, value) => value ?? "–" },
        line("policy", "--accent", { width: 1, alpha: 0.5 }),
        line("policy, average of ten", "--accent", { points: { show: false } }),
        line("served best", "--second", { dash: [8, 4] }),
        ...(marks.length ? [line("held-out rows", "--ink", { paths: () => null, points: { show: true, size: 9 } })] : []),
      ],
    };
  }

  async function draw() {
    const reply = await fetch(box.dataset.source);
    if (!reply.ok) return;
    points = await reply.json();
    show();
  }

  function show() {
    drawnMarks = marksJson();
    const marks = heldOutMarks(drawnMarks);
    const pointOf = new Map(points.map((point) => [point.first_step, point]));
    const markOf = new Map(marks.map((mark) => [mark.step, mark]));
    const steps = [...new Set([...pointOf.keys(), ...markOf.keys()])].sort((one, other) => one - other);
    const column = (name) => steps.map((step) => pointOf.get(step)?.[name] ?? null);
    const data = [
      steps,
      ...["policy_mean", "policy_average", "returned_best"].map(column),
      ...(marks.length ? [steps.map((step) => markOf.get(step)?.mean ?? null)] : []),
    ];
    if (chart) chart.destroy();
    chart = null;
    // A box that is hidden has no width, so it is shown before the chart is made.
    box.hidden = points.length === 0;
    if (box.hidden) return;
    const breaks = points.filter((point) => point.changed);
    chart = new uPlot(options(breaks, marks), data, box);
  }

  // live.js limits how often this event comes.
  document.body.addEventListener("ledger", draw);
  // The part of the page with the marks is loaded at the same time as the curve, and may come later.
  document.body.addEventListener("htmx:afterSwap", () => {
    if (chart && marksJson() !== drawnMarks) show();
  });
  window.addEventListener("resize", () => {
    if (chart) chart.setSize({ width: box.clientWidth, height: HEIGHT });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
