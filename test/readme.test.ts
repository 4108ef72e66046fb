/**
 * The README of the repository, and those that npm shows. `HOLDFAST_WRITE_DOCS=1 vitest run test/readme.test.ts` writes that of the
 * library anew. What is in it is run by `packaging.test.ts`.
 */
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { format } from "prettier";
import { describe, expect, test } from "vitest";
import { anchorsOf } from "../site/.vitepress/slug.ts";
import { readmeChart } from "./harness/readme-chart.ts";

const root = fileURLToPath(new URL("..", import.meta.url));
const read = (file: string): string => readFileSync(`${root}${file}`, "utf8");

interface Manifest {
  readonly homepage: string;
  readonly bugs: { readonly url: string };
  readonly repository: { readonly type: string; readonly url: string; readonly directory?: string };
  readonly keywords?: readonly string[];
}

const manifest = (folder: string): Manifest => JSON.parse(read(`${folder}package.json`)) as Manifest;

/** The one place that says where the repository is: `repository` of the root's package.json. */
const repository = manifest("")
  .repository.url.replace(/^git\+/, "")
  .replace(/\.git$/, "");

/** Links that work wherever it is shown. */
const absolute = (text: string): string =>
  text
    .replaceAll(/\]\((?!https?:|#)([^)]+)\)/g, `](${repository}/blob/main/$1)`)
    .replaceAll(/<img src="(?!https?:)([^"]+)"/g, `<img src="${repository}/raw/main/$1"`);

test("its chart is made of what the bench has drawn", () => {
  const file = "docs/readme.svg";
  const wanted = readmeChart(read("docs/quota.svg"));
  if (process.env["HOLDFAST_WRITE_DOCS"] === "1") writeFileSync(`${root}${file}`, wanted);
  expect(read(file)).toBe(wanted);
});

test("its first screen has the two commands that do everything, and CI runs the second one", () => {
  const screen = read("README.md").split("\n").slice(0, 24);
  const commands = screen
    .filter((line) => line.startsWith("npm ci"))
    .map((line) => line.replace(/\s+#.*$/, ""));
  expect(commands).toEqual(["npm ci && npm start", "npm ci && npm test"]);
  expect(read(".ci/run").trim().split("\n").at(-1)).toBe(commands[1]);
  const { scripts } = JSON.parse(read("package.json")) as { scripts: Record<string, string> };
  expect(Object.keys(scripts)).toEqual(expect.arrayContaining(["start", "test"]));
});

test("npm shows the same text, with links that lead to the repository", async () => {
  const file = "packages/holdfast/README.md";
  const wanted = await format(absolute(read("README.md")), {
    parser: "markdown",
    printWidth: 110,
    proseWrap: "preserve",
  });
  if (process.env["HOLDFAST_WRITE_DOCS"] === "1") writeFileSync(`${root}${file}`, wanted);
  expect(read(file)).toBe(wanted);
});

describe.each(["holdfast", "cli"])("packages/%s", (name) => {
  test("its package.json says where it is from", () => {
    const { homepage, bugs, repository: own, keywords } = manifest(`packages/${name}/`);
    const workspace = manifest("");
    expect({ homepage, bugs }).toEqual({ homepage: workspace.homepage, bugs: workspace.bugs });
    expect(own).toEqual({ ...workspace.repository, directory: `packages/${name}` });
    expect(keywords?.length).toBeGreaterThan(5);
    expect(homepage.startsWith(repository) && bugs.url.startsWith(repository)).toBe(true);
  });

  test("its README leads to files that are there", () => {
    const text = read(`packages/${name}/README.md`);
    const targets = [...text.matchAll(/\]\(([^)]+)\)|<img src="([^"]+)"/g)].map(
      ([, link, image]) => link ?? image ?? "",
    );
    expect(targets.length).toBeGreaterThan(5);
    for (const target of targets) {
      expect(target.startsWith(`${repository}/`), target).toBe(true);
      const [path = "", place] = target
        .slice(repository.length + 1)
        .replace(/^(?:blob|raw)\/main\//, "")
        .split("#");
      expect(existsSync(`${root}${path}`), target).toBe(true);
      if (place !== undefined) expect([...anchorsOf(read(path))], target).toContain(place);
    }
  });
});

test("the README is short: what there is besides is in docs/overview.md", () => {
  expect(read("README.md").split("\n").length).toBeLessThan(130);
  expect(read("docs/overview.md").match(/^- /gm)?.length).toBeGreaterThan(24);
});
