/** The anchor of a heading as GitHub makes it: a link works there, and in the site. */
export const slug = (heading: string): string =>
  heading
    .trim()
    .toLowerCase()
    .replaceAll(/[^\p{L}\p{M}\p{N}\p{Pc}\- ]/gu, "")
    .replaceAll(" ", "-");

/** All anchors of a page, in the order of its headings. */
export function anchorsOf(markdown: string): Set<string> {
  const anchors = new Set<string>();
  const prose = markdown.replaceAll(/^([ \t]*)```[\s\S]*?^\1```[ \t]*$/gm, "");
  for (const [, heading = ""] of prose.matchAll(/^#{1,6} (.+)$/gm)) {
    const base = slug(heading.replaceAll(/\[([^\]]*)\]\([^)]*\)/g, "$1").replaceAll(/[`\\]/g, ""));
    let anchor = base;
    for (let n = 1; anchors.has(anchor); n++) anchor = `${base}-${n}`;
    anchors.add(anchor);
  }
  return anchors;
}
