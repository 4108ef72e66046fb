/** A page for each example: its README, if it has one, and its files. */
import { extname } from "node:path";
import { filesIn, read } from "./places.ts";

export interface Example {
  readonly name: string;
  /** The path that its links start from. */
  readonly from: string;
  readonly page: string;
}

const languages: Record<string, string> = {
  ".ts": "ts",
  ".prisma": "prisma",
  ".sql": "sql",
  ".json": "json",
};

export function examples(): Example[] {
  const files = filesIn("examples").filter((path) => path.split("/").length > 2);
  const names = [...new Set(files.map((path) => path.split("/")[1] ?? ""))];
  return names.map((name) => {
    const folder = `examples/${name}`;
    const readme = `${folder}/README.md`;
    const sources = files
      .filter((path) => path.startsWith(`${folder}/`) && languages[extname(path)] !== undefined)
      .flatMap((path) => [
        `## ${path.slice(folder.length + 1)}`,
        `\`\`\`\`${languages[extname(path)]}\n${read(path).trimEnd()}\n\`\`\`\``,
      ]);
    return {
      name,
      from: readme,
      page: [files.includes(readme) ? read(readme).trimEnd() : `# Example: ${name}`, ...sources, ""].join(
        "\n\n",
      ),
    };
  });
}
