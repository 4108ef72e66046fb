/** Markdown as it is in the repository, made markdown of a page. */
import { dirname, join, normalize } from "node:path";
import { pageOf, read } from "./places.ts";

/** What is in code fences stays as it is; `change` gets the lines around them. */
export function outsideFences(markdown: string, change: (text: string) => string): string {
  return markdown
    .split(/(^[ \t]*```[^\n]*\n[\s\S]*?^[ \t]*```[ \t]*$)/m)
    .map((part, i) => (i % 2 === 0 ? change(part) : part))
    .join("");
}

const manifest: { repository?: string | { url: string } } = JSON.parse(
  read("packages/holdfast/package.json"),
);
const repository = (
  typeof manifest.repository === "string" ? manifest.repository : manifest.repository?.url
)?.replaceAll(/^git\+|\.git$/g, "");

/**
 * Links between files of the repository become links between pages. What has no page (sources, tests) is a link into the
 * repository, if package.json says where that is, and else no link.
 */
function links(markdown: string, from: string): string {
  return markdown.replaceAll(
    /(!?)\[((?:[^\][]|\[[^\][]*\])*)\]\(([^()\s]+)\)/g,
    (all, image: string, text: string, target: string) => {
      if (image !== "" || /^(https?:|mailto:|#)/.test(target)) return all;
      const [path = "", anchor] = target.split("#");
      const file = normalize(join(dirname(from), path)).replace(/\/$/, "");
      const page = pageOf(file);
      if (page !== undefined) return `[${text}](${page}${anchor === undefined ? "" : `#${anchor}`})`;
      return repository === undefined ? text : `[${text}](${repository}/blob/HEAD/${file})`;
    },
  );
}

/** `HF_DEADLOCK` leads to its page. */
const codes = (markdown: string, known: ReadonlySet<string>) =>
  markdown
    .split("\n")
    .map((line) =>
      line.startsWith("#")
        ? line
        : line.replaceAll(/(\[[^\]]*\]\([^)]*\))|`(HF_[A-Z_]+)`/g, (all, link?: string, code?: string) =>
            link === undefined && code !== undefined && known.has(code)
              ? `[${all}](/errors/${code}.md)`
              : all,
          ),
    )
    .join("\n");

/**
 * Blocks of code that follow each other, each under a line with nothing but the name of a client in bold, become tabs. In the
 * repository they are just that.
 */
function tabs(markdown: string): string {
  const one = String.raw`^\*\*[^*\n]+\*\*\n\n\`\`\`\w+\n[\s\S]*?^\`\`\`$`;
  return markdown.replaceAll(new RegExp(`(?:${one}\\n\\n){1,}${one}`, "gm"), (group) => {
    const blocks = group.replaceAll(/^\*\*([^*\n]+)\*\*\n\n```(\w+)$/gm, "```$2 [$1]");
    return `::: code-group\n\n${blocks}\n\n:::`;
  });
}

/** A comment that names a recorded schedule, and the text of it in a block, become the one that can be stepped through. */
const schedules = (markdown: string) =>
  markdown.replaceAll(/^<!-- schedule: ([\w-]+) -->\n\n```[\s\S]*?^```$/gm, '<Schedule name="$1" />');

/** Other comments `<!-- component: Name -->` are places of components, which the repository does not show. */
const components = (markdown: string) => markdown.replaceAll(/^<!-- component: (\w+) -->$/gm, "<$1 />");

export function toPage(markdown: string, from: string, known: ReadonlySet<string>): string {
  const shown = components(tabs(schedules(markdown)));
  return outsideFences(shown, (text) => codes(links(text, from), known));
}

export const titleOf = (markdown: string): string =>
  /^# (.+)$/m.exec(markdown)?.[1]?.replaceAll("`", "") ?? "Untitled";
