"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 640px)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function axis(given, phone) {
    const line = colour("--line");
    const found = { gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, ...given };
    if (given && given.title) found.title = { ...given.title, standoff: phone ? 6 : 12 };
    return found;
  }

  // What a spec leaves to the page: colours of the theme, and room on a phone.
  function layoutOf(spec) {
    const phone = narrow.matches;
    const { rows, ...given } = spec.layout;
    const layout = {
      ...given,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--text"), size: phone ? 11 : 13, family: "system-ui, 'Liberation Sans', sans-serif" },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text"), size: 12 }, align: "left" },
      margin: { l: phone ? 48 : 64, r: phone ? 8 : 20, t: 10, b: phone ? 46 : 52 },
      legend: { orientation: "h", yanchor: "bottom", y: 1.02, x: 0, xanchor: "left", font: { size: phone ? 10 : 12 } },
      showlegend: spec.data.length > 1 || spec.data[0]?.type === "bar",
      hovermode: "closest", dragmode: false,
      xaxis: axis(given.xaxis, phone), yaxis: axis(given.yaxis, phone),
    };
    if (rows && phone) {
      // Long names do not fit beside the points: they go above each row.
      layout.height = 110 + (given.height - 130) / 27 * 42;
      layout.yaxis = { ...layout.yaxis, showticklabels: false, automargin: false };
      layout.annotations = given.yaxis.categoryarray.map((name, i) => ({
        text: name, xref: "paper", x: 0, xanchor: "left", y: i, yshift: 11, showarrow: false,
        font: { color: colour("--soft"), size: 11 }, bgcolor: colour("--card"), borderpad: 0,
      }));
      layout.margin.l = 6;
      layout.xaxis = { ...layout.xaxis, tickangle: 0 };
    }
    return layout;
  }

  function draw(element, spec) {
    element.spec = spec;
    const data = structuredClone(spec.data);
    for (const trace of data) {
      if (trace.colorbar && narrow.matches) trace.colorbar = { ...trace.colorbar, orientation: "h", y: 1.02, yanchor: "bottom", len: 1, title: { text: "" } };
    }
    return Plotly.react(element, data, layoutOf(spec), { responsive: true, displayModeBar: false, displaylogo: false });
  }

  function show(name, index) {
    const place = document.getElementById(`plots-${name}`);
    const specs = figures[name][index].plots;
    while (place.children.length > specs.length) { Plotly.purge(place.lastChild); place.lastChild.remove(); }
    while (place.children.length < specs.length) {
      const element = document.createElement("div");
      element.className = "plot";
      place.append(element);
    }
    specs.forEach((spec, i) => draw(place.children[i], spec));
  }

  for (const name of Object.keys(figures)) {
    const menu = document.getElementById(`menu-${name}`);
    if (menu) menu.addEventListener("change", () => show(name, menu.selectedIndex));
    show(name, 0);
  }
  const again = () => document.querySelectorAll(".plot").forEach((element) => {
    Plotly.purge(element); // else the scale of colours, once turned, leaves its labels behind
    draw(element, element.spec);
  });
  dark.addEventListener("change", again);
  narrow.addEventListener("change", again);
})();
