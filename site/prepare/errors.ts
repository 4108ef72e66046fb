/** A page for each error code, of the table in docs/errors.md. */
import { read } from "./places.ts";

export interface ErrorCode {
  readonly code: string;
  readonly page: string;
}

const cells = (line: string) =>
  line
    .split(/(?<!\\)\|/)
    .slice(1, -1)
    .map((cell) => cell.trim());

const sentence = (text: string) => (/[.!?]$/.test(text) ? text : `${text}.`);

export function errorCodes(): ErrorCode[] {
  return read("docs/errors.md")
    .split("\n")
    .filter((line) => line.startsWith("| `HF_"))
    .map((line) => {
      const [name = "", type = "", when = "", what = "", retryable = "", again = ""] = cells(line);
      const code = name.replaceAll("`", "");
      return {
        code,
        page: [
          `# ${code}`,
          `The \`code\` of a ${type}.`,
          `## When`,
          sentence(when),
          `## What to do`,
          sentence(what),
          `## Retry`,
          `- \`retryable\`: ${retryable}\n- Holdfast runs it again by itself: ${again}`,
          `All codes, and what errors carry: [errors](errors.md).`,
          "",
        ].join("\n\n"),
      };
    });
}

/** On the site each code has a page of its own: the table of all of them does with what it takes to find the right one. */
export const shortTable = (markdown: string): string =>
  markdown
    .replace('(column "again")', "(the page of a code says where)")
    .split("\n")
    .map((line) => {
      if (!/^\| (`HF_|code|-)/.test(line) || cells(line).length !== 6) return line;
      const [code, , when, what] = cells(line);
      return `| ${code} | ${when} | ${what} |`;
    })
    .join("\n");
