/** What is written about Holdfast, taken apart. */
import { globSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { root } from "../harness/command.ts";

/** Paths in the repository. */
export const files: readonly string[] = globSync(
  ["*.md", "docs/**/*.md", "packages/*/README.md", "examples/README.md", "examples/*/README.md"],
  { cwd: root },
).toSorted();

export const textOf = (file: string): string => readFileSync(join(root, file), "utf8");

export interface Block {
  readonly file: string;
  /** Of its first line. */
  readonly line: number;
  readonly language: string;
  readonly code: string;
  /** Of a tab: the client that it is for. */
  readonly tab?: string;
}

export function blocksOf(file: string): Block[] {
  const text = textOf(file);
  return [...text.matchAll(/^([ \t]*)```(\w*)[^\n]*\n([\s\S]*?)^\1```[ \t]*$/gm)].map(
    ({ index, 2: language = "", 3: code = "" }) => {
      const before = text.slice(0, index);
      const [, tab] = /(?:^|\n)\*\*([^*\n]+)\*\*\n\n$/.exec(before) ?? [];
      return {
        file,
        line: before.split("\n").length + 1,
        language,
        code,
        ...(tab === undefined ? {} : { tab }),
      };
    },
  );
}

/** Without blocks of code. */
export const proseOf = (file: string): string =>
  textOf(file).replaceAll(/^([ \t]*)```[\s\S]*?^\1```[ \t]*$/gm, "");

export const linksOf = (file: string): string[] =>
  [...proseOf(file).matchAll(/\]\(([^()\s]+)\)/g)].map(([, target = ""]) => target);
