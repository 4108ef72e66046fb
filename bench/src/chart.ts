/** A report drawn: one panel for each cell, a bar for each contestant. Read on white and on dark pages. */
import { type Spec, View, parse } from "vega";
import { type TopLevelSpec, compile } from "vega-lite";
import type { Report } from "./report.ts";

const ours = /^holdfast\b/;

export function chart({ suite, rows, machine }: Report): Promise<string> {
  const values = rows.map(({ cell, contestant, opsPerSecond, p99Ms }) => ({
    cell,
    contestant,
    opsPerSecond,
    ours: ours.test(contestant),
    label: `${figure(opsPerSecond)}/s · p99 ${figure(p99Ms)} ms`,
  }));
  // As the suite has them, ours last.
  const names = [...new Set(values.map(({ contestant }) => contestant))];
  const spec: TopLevelSpec = {
    data: { values },
    background: "#fff",
    padding: 16,
    title: {
      text: `${suite}: operations per second`,
      subtitle: `${machine.cpus} cores shared by the callers and the servers, PostgreSQL ${machine.postgres}, Node ${machine.node}`,
      anchor: "start",
      offset: 12,
    },
    facet: {
      row: {
        field: "cell",
        type: "nominal",
        sort: [...new Set(values.map(({ cell }) => cell))],
        header: {
          title: null,
          labelAngle: 0,
          labelAnchor: "start",
          labelOrient: "top",
          labelFontWeight: "bold",
        },
      },
    },
    resolve: { scale: { x: "independent", y: "independent" } },
    spacing: 14,
    spec: {
      width: 420,
      height: { step: 18 },
      encoding: {
        y: {
          field: "contestant",
          type: "nominal",
          sort: names,
          axis: { title: null, labelLimit: 400, ticks: false, domain: false, labelPadding: 8 },
        },
        x: { field: "opsPerSecond", type: "quantitative", axis: null },
      },
      layer: [
        {
          mark: { type: "bar", cornerRadiusEnd: 2 },
          encoding: {
            color: {
              field: "ours",
              type: "nominal",
              scale: { domain: [true, false], range: ["#0b7a75", "#b8c4c2"] },
              legend: null,
            },
          },
        },
        {
          mark: { type: "text", align: "left", dx: 5, fontSize: 10, color: "#333", clip: false },
          encoding: { text: { field: "label" } },
        },
      ],
    },
    config: { view: { stroke: null }, font: "system-ui, sans-serif", axis: { labelLimit: 400 } },
  };
  // Room for the labels of the longest bars, which stand outside of their panel.
  const compiled: Spec = compile(spec).spec;
  return new View(parse({ ...compiled, padding: { left: 16, top: 16, bottom: 16, right: 130 } }), {
    renderer: "none",
  }).toSVG();
}

function figure(value: number): string {
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}
