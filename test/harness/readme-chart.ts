/** The chart of the README: two of the cells that `npm run bench -- quota --svg docs/quota.svg` has drawn. */

const shown = { "hot, 64": "64 callers, one user", "hot, 1": "one caller, one user" } as const;

interface Bar {
  readonly name: string;
  readonly text: string;
  readonly perSecond: number;
}

/** Bars by the title of their cell, as the texts of the bench's chart say: names, then figures, then the title. */
function cellsOf(svg: string): ReadonlyMap<string, readonly Bar[]> {
  const cells = new Map<string, Bar[]>();
  let [names, figures]: [string[], string[]] = [[], []];
  for (const [, text = ""] of svg.matchAll(/<text[^>]*>(.*?)<\/text>/g)) {
    if (text.includes("/s · p99")) figures.push(text);
    else if (figures.length === 0) names.push(text);
    else {
      const own = names.slice(-figures.length);
      const bars = figures.map((figure, i) => ({
        name: own[i] ?? "",
        text: figure,
        perSecond: Number((figure.split("/s")[0] ?? "").replaceAll(",", "")),
      }));
      cells.set(text, bars);
      [names, figures] = [[], []];
    }
  }
  return cells;
}

/** Readable on a light page and on a dark one: it brings its own ground. */
export function readmeChart(svg: string): string {
  const cells = cellsOf(svg);
  const [left, width, row] = [290, 760, 20];
  let y = 12;
  const parts: string[] = [];
  for (const [cell, title] of Object.entries(shown)) {
    const bars = cells.get(cell);
    if (bars?.length !== 5) throw new Error(`docs/quota.svg has no five bars of ${cell}`);
    const most = Math.max(...bars.map(({ perSecond }) => perSecond));
    y += 20;
    parts.push(
      `<text x="${left}" y="${y - 6}" font-weight="600">Units of a quota per second: ${title}</text>`,
    );
    for (const { name, text, perSecond } of bars) {
      const ours = name.startsWith("holdfast");
      const label = name.replace(", default durabili…", "").replace(", appendfsync alwa…", ", fsync");
      const long = Math.max(2, Math.round((perSecond / most) * (width - left - 160)));
      parts.push(
        `<text x="${left - 8}" y="${y + 13}" text-anchor="end"${ours ? ' font-weight="600"' : ""}>${label}</text>`,
        `<rect x="${left}" y="${y + 2}" width="${long}" height="${row - 6}" fill="${ours ? "#0f766e" : "#b8c4c2"}"/>`,
        `<text x="${left + long + 6}" y="${y + 13}">${text}</text>`,
      );
      y += row;
    }
    y += 10;
  }
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${y}" viewBox="0 0 ${width} ${y}" font-family="system-ui, sans-serif" font-size="13" fill="#1f2328">
<rect width="${width}" height="${y}" fill="#fff"/>
${parts.join("\n")}
</svg>
`;
}
