/**
 * Writes the pages of the site: docs/ is the source. What it does not have is made of what there is: a page for each error
 * code, verb and example, and the reference. None of it is committed.
 */
import { readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { api } from "./api.ts";
import { verbs } from "./commands.ts";
import { errorCodes, shortTable } from "./errors.ts";
import { examples } from "./examples.ts";
import { home } from "./home.ts";
import { titleOf, toPage } from "./markdown.ts";
import { filesIn, read, root, stale, write } from "./places.ts";
import { sidebars } from "./sidebar.ts";

const codes = errorCodes();
const known: ReadonlySet<string> = new Set(codes.map(({ code }) => code));

function page(path: string, markdown: string, from: string): void {
  write(path, toPage(markdown, from, known));
}

export async function prepare(): Promise<void> {
  const reference = await api();
  for (const { path, page: text } of reference) write(join("api", path), text);
  prepareDocs();
  const commands = verbs();
  for (const { name, page: text } of commands) page(`commands/${name}.md`, text, "docs/commands.md");
  for (const { code, page: text } of codes) page(`errors/${code}.md`, text, "docs/errors.md");
  const shown = examples();
  for (const { name, from, page: text } of shown) page(`examples/${name}.md`, text, from);
  page("examples/index.md", read("examples/README.md"), "examples/README.md");
  page("changelog.md", read("CHANGELOG.md"), "CHANGELOG.md");
  page("contributing.md", read("CONTRIBUTING.md"), "CONTRIBUTING.md");
  page("index.md", home(), "docs/choose.md");
  write(
    "sidebars.json",
    JSON.stringify(
      sidebars({
        commands: commands.map(({ name }) => name),
        codes: [...known],
        modules: reference.map(({ path, page: text }) => ({ path, title: titleOf(text) })),
        examples: shown.map(({ name }) => name),
      }),
    ),
  );
  for (const file of stale()) rmSync(file);
}

/** What changes while somebody writes. */
export function prepareDocs(): void {
  for (const path of filesIn("docs")) {
    const inside = path.slice("docs/".length);
    if (path.endsWith(".md"))
      page(inside, inside === "errors.md" ? shortTable(read(path)) : read(path), path);
    else {
      const bytes = readFileSync(join(root, path));
      write(path.endsWith(".svg") ? inside : join("public", inside), bytes);
    }
  }
  for (const folder of folders()) page(`${folder}/index.md`, contents(folder), `docs/${folder}/index.md`);
}

const folders = () => [
  ...new Set(
    filesIn("docs", ".md")
      .map((path) => path.split("/"))
      .filter((parts) => parts.length > 2)
      .map(([, folder = ""]) => folder),
  ),
];

/** A folder's page: what is in it. */
function contents(folder: string): string {
  const names: Record<string, string> = { adapters: "Clients" };
  const title = names[folder] ?? folder.charAt(0).toUpperCase() + folder.slice(1).replaceAll("-", " ");
  const list = filesIn(`docs/${folder}`, ".md").map(
    (path) => `- [${titleOf(read(path))}](${path.slice(`docs/${folder}/`.length)})`,
  );
  return [`# ${title}`, list.join("\n"), ""].join("\n\n");
}
