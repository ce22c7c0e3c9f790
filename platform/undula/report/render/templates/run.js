"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const SVG = "http://www.w3.org/2000/svg";
const NEAR_PX = 7;

function nearest(sorted, x) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - sorted[low - 1] < sorted[low] - x ? low - 1 : low;
}

function figure(value) {
  if (value === null) return "not a number";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3);
  return Number.isInteger(value) ? value.toLocaleString("en-US") : value.toPrecision(4);
}

function clock(seconds) {
  const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(s / 3600);
  return (hours ? hours + ":" + two(Math.floor(s / 60) % 60) : Math.floor(s / 60)) + ":" + two(s % 60);
}

function add(parent, tag, text, name) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

const place_on = {
  time: clock,
  samples: (x) => Math.round(x).toLocaleString("en-US") + " samples",
  step: (x) => "step " + Math.round(x).toLocaleString("en-US"),
  dollars: (x) => "$" + x.toPrecision(3),
};

function leader(chart, axis) {
  return chart.curves.find((curve) => curve[axis]);
}

function fill(chart, axis, x, near) {
  const lead = leader(chart, axis), at = nearest(lead[axis], x);
  tip.replaceChildren();
  const shown = data.compares ? [axis] : ["time", "step", "samples"];
  add(tip, "div", shown.map((name) => place_on[name](data.compares ? x : lead[name][at])).join(" · "), "head");
  for (const curve of chart.curves) {
    const xs = (curve.time ? curve : lead)[axis];
    if (!xs) continue;
    const place = nearest(xs, x);
    if (data.compares ? x > xs[xs.length - 1] + near : curve.sparse && (Math.abs(xs[place] - x) > near || (curve.only || axis) !== axis)) continue;
    const row = add(tip, "div", undefined, "row");
    add(row, "span", curve.label);
    add(row, "b", figure(curve.y[place]));
  }
  const close = data.events.filter((event) => Math.abs(event[axis] - x) <= near);
  close.sort((a, b) => Math.abs(a[axis] - x) - Math.abs(b[axis] - x));
  for (const event of close.slice(0, 3)) add(tip, "div", event.kind + ": " + event.message, "event");
  return data.compares ? x : lead[axis][at];
}

function put(plot, clientX, clientY) {
  const box = plot.getBoundingClientRect(), axis = plot.closest(".view").dataset.axis;
  const span = data.extent[axis];
  const fraction = Math.min(Math.max((clientX - box.left) / box.width, 0), 1);
  const at = fill(data.charts[plot.dataset.chart], axis, fraction * span, NEAR_PX / box.width * span);
  for (const line of plot.closest(".view").querySelectorAll(".cross")) {
    for (const name of ["x1", "x2"]) line.setAttribute(name, at / span * 100 + "%");
    line.setAttribute("visibility", "visible");
  }
  const left = clientX + 16 + tip.offsetWidth > innerWidth ? clientX - 16 - tip.offsetWidth : clientX + 16;
  tip.style.left = Math.max(left, 6) + "px";
  tip.style.top = Math.max(Math.min(clientY + 14, innerHeight - tip.offsetHeight - 8), 6) + "px";
  tip.style.visibility = "visible";
  plot.dataset.at = at;
}

function hide() {
  tip.style.visibility = "hidden";
  for (const line of document.querySelectorAll(".cross")) line.setAttribute("visibility", "hidden");
}

function move(event, plot) {
  const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (event.key === "Escape") hide();
  if (!way) return;
  event.preventDefault();
  const box = plot.getBoundingClientRect(), axis = plot.closest(".view").dataset.axis;
  const xs = leader(data.charts[plot.dataset.chart], axis)[axis];
  const place = nearest(xs, Number(plot.dataset.at || 0)) + way * Math.max(Math.round(xs.length / 200), 1);
  put(plot, box.left + xs[Math.min(Math.max(place, 0), xs.length - 1)] / data.extent[axis] * box.width, box.top + box.height / 3);
}

for (const plot of document.querySelectorAll(".plot")) {
  const line = document.createElementNS(SVG, "line");
  for (const [name, value] of [["class", "cross"], ["y1", "0"], ["y2", "100%"], ["visibility", "hidden"]]) line.setAttribute(name, value);
  plot.append(line);
  for (const name of ["pointermove", "pointerdown"]) plot.addEventListener(name, (event) => put(plot, event.clientX, event.clientY));
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => move(event, plot));
}
addEventListener("scroll", hide, { passive: true });
