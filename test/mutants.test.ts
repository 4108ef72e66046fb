/** That the list of protections is whole: each is used, told of, and tried. What the trials say is `npm run test:mutants`. */
import { execFileSync } from "node:child_process";
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { expect, test } from "vitest";
import { file, protections, without } from "./mutants/protections.ts";
import { trials } from "./mutants/trials.ts";

const root = fileURLToPath(new URL("..", import.meta.url));
const sources = join(root, "packages/holdfast/src");
const text = readFileSync(file, "utf8");
const all = protections();
const names = all.map(({ name }) => name).toSorted();

const files = readdirSync(sources, { recursive: true, encoding: "utf8" })
  .filter((path) => path.endsWith(".ts") && join(sources, path) !== fileURLToPath(file))
  .map((path) => ({ path, code: readFileSync(join(sources, path), "utf8") }));

test("there are at least 20, each a constant with a sentence, and nothing else is in the file", () => {
  expect(names.length).toBeGreaterThanOrEqual(20);
  expect(new Set(names).size).toBe(names.length);
  expect(text.match(/^export /gm)?.length).toBe(names.length);
  for (const { against } of all) expect(against).toMatch(/^[A-Z].*\.$/s);
});

test("each is used in the sources, and what is used is named", () => {
  const used = files
    .filter(({ code }) => code.includes("/protections.ts"))
    .flatMap(({ path, code }) => {
      // In one spelling, so that uses are found.
      expect(code, path).toMatch(/^import \* as protection from "[./]+\/(seam\/)?protections\.ts";$/m);
      return [...code.matchAll(/\bprotection\.(\w+)/g)].map(([, name]) => name as string);
    });
  expect([...new Set(used)].toSorted()).toEqual(names);
});

test("each has a trial that must fail without it, and trials name no others", () => {
  expect([...new Set(trials.flatMap(({ kills }) => kills))].toSorted()).toEqual(names);
  expect(new Set(trials.map(({ name }) => name)).size).toBe(trials.length);
});

test("docs/mutants.md tells of all of them, as they are", () => {
  const lines = readFileSync(join(root, "docs/mutants.md"), "utf8").split("\n");
  const rows = lines
    .filter((line) => line.startsWith("| `"))
    .map((line) =>
      line
        .split("|")
        .map((cell) => cell.trim())
        .slice(1, 4),
    );
  const expected = all.map(({ name, against }) => [
    `\`${name}\``,
    against,
    trials
      .filter(({ kills }) => kills.includes(name))
      .map((trial) => `${trial.by}: ${trial.name}`)
      .join("; "),
  ]);
  expect(rows).toEqual(expected);
});

test("a process that is started without one of them is without it, and has the others", () => {
  const script = `import * as all from ${JSON.stringify(file.href)};
    console.log(JSON.stringify(Object.entries(all).filter(([, on]) => !on)));`;
  const hook = new URL("./mutants/hook.ts", import.meta.url).href;
  const run = (mutant: string) =>
    execFileSync(process.execPath, ["--import", hook, "--input-type=module", "--eval", script], {
      env: { ...process.env, HOLDFAST_MUTANT: mutant, NODE_NO_WARNINGS: "1" },
      encoding: "utf8",
    }).trim();
  expect(run("")).toBe("[]");
  expect(run("fenceGrows")).toBe('[["fenceGrows",false]]');
  expect(() => without("nothing", text)).toThrow("no protection");
});

test("the library is the one that HOLDFAST_MUTANT says, in these tests too", async () => {
  const here = (await import(fileURLToPath(file))) as Readonly<Record<string, boolean>>;
  const off = Object.entries(here).filter(([, on]) => !on);
  const mutant = process.env["HOLDFAST_MUTANT"];
  expect(off.map(([name]) => name)).toEqual(mutant ? [mutant] : []);
  if (mutant) return;
  const self = ["run", "test/mutants.test.ts", "-t", "the library is the one"];
  execFileSync(join(root, "node_modules/.bin/vitest"), self, {
    cwd: root,
    // In CI all servers would have to be there.
    env: { ...process.env, CI: "", HOLDFAST_MUTANT: "fenceGrows", HOLDFAST_SERVERS: "none" },
    stdio: "pipe",
  });
});
