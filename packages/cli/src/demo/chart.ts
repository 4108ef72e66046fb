/** Bars of what the tables say, and a line at what they should say. */
import { escape } from "../race/text.ts";
import { type RaceResult, marks, saidOf } from "./result.ts";

const row = 50;
const bar = 18;
const top = 26;

export function chart({ title, counts, ways }: RaceResult, width: number): string {
  const expected = Math.max(...ways.map((way) => way.expected));
  const most = Math.max(expected, ...ways.map(({ counted }) => counted), 1);
  // Room for the line itself.
  const at = (value: number): number => Math.round(((width - 2) * value) / most);
  const line = at(expected);
  const height = top + ways.length * row;
  const part = (kind: string, from: number, to: number, y: number): string =>
    `<rect class="bar ${kind}" x="${at(from)}" y="${y + 20}" width="${Math.max(1, at(to) - at(from))}" height="${bar}"/>`;
  const bars = ways.map((way, i) => {
    const y = top + i * row;
    return `<text x="0" y="${y + 14}"><tspan class="way">${escape(way.way)}</tspan> <tspan class="value ${way.verdict}">${marks[way.verdict]} ${way.counted}</tspan></text>
${part(way.verdict, 0, Math.min(way.counted, expected), y)}${way.counted > expected ? part("over", expected, way.counted, y) : ""}`;
  });
  // Beside the line, on the side that has room for it.
  const label =
    line > width / 2
      ? `<text class="due" x="${line - 5}" y="13" text-anchor="end">`
      : `<text class="due" x="${line + 5}" y="13">`;
  const said = ways.map((way) => `${way.way}: ${saidOf(way)}`).join("; ");
  return `<svg class="chart" role="img" aria-label="${escape(`${title}. ${said}`)}" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}">
${bars.join("\n")}
<line class="due" x1="${line}" x2="${line}" y1="2" y2="${height - 6}"/>
${label}right: ${expected} ${escape(counts)}</text>
</svg>`;
}
