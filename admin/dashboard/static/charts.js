"use strict";
// Charts by uPlot, with legends of their own: these show values at all times, the last ones or those under the pointer.
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Times of an axis: no finer than its steps, and with the date where that changes.
function axisTimes(u, splits, axis, space, step) {
  let day = "";
  return splits.map((s) => {
    const text = clock(s * 1000), date = text.slice(5, 10);
    if (step >= 86400) return date;
    const label = `${text.slice(11, step >= 60 ? 16 : 19)}${date === day ? "" : `\n${date}`}`;
    day = date;
    return label;
  });
}

// The line of text above a chart: `entries` gives [color, name, value] for each series, and `title` what they are of.
function showLegend(place, title, entries) {
  const parts = entries.map(([color, name, value]) => {
    const part = document.createElement("span"), sign = document.createElement("i"), text = document.createElement("b");
    sign.style.background = color;
    text.textContent = value;
    part.append(sign, `${name} `, text);
    return part;
  });
  place.replaceChildren(...(title ? [title] : []), ...parts);
}

// Draws series ([[label, color, more], ...]) over data; `legend(i)` fills the legend for a point, or with null at rest.
function chart(place, series, data, legend, more = {}) {
  const line = { stroke: css("--line"), width: 1 };
  const axis = { stroke: css("--soft"), grid: line, ticks: line };
  const { axisY, ...rest } = more;
  const options = {
    width: place.clientWidth, height: place.clientHeight - 30,
    ...(isLocal() ? {} : { tzDate: (s) => uPlot.tzDate(new Date(s * 1e3), "Etc/UTC") }),
    axes: [{ ...axis, space: 75, values: axisTimes }, { ...axis, size: 62, ...axisY }],
    legend: { show: false },
    scales: { y: { range: (u, low, high) => [0, Math.max(1, high * 1.1)] } },
    series: [{}, ...series.map(([label, color, extra]) => ({ label, stroke: css(color), width: 2, spanGaps: true, points: { show: false }, ...extra }))],
    ...rest,
    hooks: { ...rest.hooks, setCursor: [(u) => legend(words, u.cursor.idx ?? null)] },
  };
  const words = Object.assign(document.createElement("p"), { className: "legend" });
  place.replaceChildren(words);
  const plot = new uPlot(options, data, place);
  legend(words, null);
  plot.rest = () => legend(words, null);
  return plot;
}
