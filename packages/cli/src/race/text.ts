/** Text for a page: nothing in it is markup, and nothing is wider than its place. */

/** Values of a database may hold what a page cannot: these are shown as what they are. */
export function escape(text: string): string {
  return (
    text
      // oxlint-disable-next-line no-control-regex -- these are what is looked for.
      .replaceAll(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f\ufffe\uffff]/g, "\u{fffd}")
      .replaceAll("&", "&amp;")
      .replaceAll("<", "&lt;")
      .replaceAll(">", "&gt;")
      .replaceAll('"', "&quot;")
      .replaceAll("'", "&#39;")
  );
}

const glyphs = new Intl.Segmenter();

/** In cells of a fixed-width font, where most of the scripts of East Asia and emoji take two. */
function cells(glyph: string): number {
  return (glyph.codePointAt(0) ?? 0) >= 0x1100 && !/^[\u2000-\u2bff]/.test(glyph) ? 2 : 1;
}

/** Lines of at most so many cells, broken at spaces where there are any; what is left over becomes "…". */
export function wrap(text: string, width: number, most: number): string[] {
  const lines: string[] = [];
  let line = "";
  let used = 0;
  /** Where the line may be broken. */
  let space = -1;
  const flat = text.replaceAll(/\s+/g, " ").trim();
  for (const { segment } of glyphs.segment(flat)) {
    if (used + cells(segment) > width) {
      if (segment === " ") {
        lines.push(line);
        [line, used, space] = ["", 0, -1];
        continue;
      }
      const cut = space > 0 ? space : line.length;
      lines.push(line.slice(0, cut).trimEnd());
      line = line.slice(cut).trimStart();
      used = [...glyphs.segment(line)].reduce((sum, each) => sum + cells(each.segment), 0);
      space = -1;
    }
    if (segment === " " || segment === ",") space = line.length + 1;
    line += segment;
    used += cells(segment);
  }
  if (line !== "") lines.push(line);
  if (lines.length <= most) return lines;
  const kept = lines.slice(0, most);
  const last = kept[most - 1] ?? "";
  kept[most - 1] = `${[...glyphs.segment(last)].length >= width ? last.slice(0, -1) : last}…`;
  return kept;
}
