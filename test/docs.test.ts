/** What is written about Holdfast: its code compiles, its links lead somewhere, and what it says of the command is so. */
import { existsSync, statSync } from "node:fs";
import { dirname, join, normalize } from "node:path";
import { expect, test } from "vitest";
import { program } from "../packages/cli/src/program.ts";
import { anchorsOf } from "../site/.vitepress/slug.ts";
import { problemsOf } from "./docs/compile.ts";
import { blocksOf, files, linksOf, proseOf, textOf } from "./docs/markdown.ts";
import { root } from "./harness/command.ts";

/** One application, in files of its own, which `nestjs.test.ts` compiles and runs. */
const application = "docs/frameworks/nestjs.md";

test("blocks of code compile", { timeout: 600_000 }, async () => {
  const pages = files.filter((file) => file !== application);
  const blocks = pages.flatMap(blocksOf).filter(({ language }) => language === "ts");
  expect(blocks.length).toBeGreaterThan(150);
  expect(await problemsOf(blocks)).toEqual([]);
});

test("a block of code that is wrong is found", { timeout: 600_000 }, async () => {
  const wrong = {
    "an option that there is none": 'await hf.transaction({ locks: key("a", 1) }, async () => {});',
    "a method that there is none": "await uploads.consumed(userId, 1);",
    "a name that is misspelt": 'import { fromPg } from "holdfast/pg";\nholdfst(fromPg(pool));',
    "a module that there is none": 'import { quota } from "holdfast/quotas";',
  };
  const block = (file: string, code: string) => ({ file, line: 1, language: "ts", code });
  expect(await problemsOf([block("no TypeScript", "const = 1;")])).not.toEqual([]);
  const problems = await problemsOf(Object.entries(wrong).map(([file, code]) => block(file, code)));
  for (const file of Object.keys(wrong))
    expect(
      problems.some((problem) => problem.startsWith(`${file}:`)),
      file,
    ).toBe(true);
});

test("links lead to a file, and to a heading of it", () => {
  const dead: string[] = [];
  let followed = 0;
  for (const file of files)
    for (const link of linksOf(file)) {
      if (/^(https?|mailto):/.test(link)) continue;
      followed++;
      const [path = "", anchor] = link.split("#");
      const target = path === "" ? file : normalize(join(dirname(file), path));
      if (!existsSync(join(root, target))) dead.push(`${file}: ${link}`);
      else if (anchor !== undefined && !statSync(join(root, target)).isDirectory())
        if (!anchorsOf(textOf(target)).has(decodeURIComponent(anchor))) dead.push(`${file}: ${link}`);
    }
  expect(dead).toEqual([]);
  expect(followed).toBeGreaterThan(500);
});

type Command = typeof program;

/** The options of a command and of those that it belongs to. */
function optionsOf(command: Command): Set<string> {
  const all = new Set(["--help", "--version"]);
  for (let at: Command | null = command; at !== null; at = at.parent)
    for (const { long, short, negate } of at.options)
      for (const name of [long, short, negate && long?.replace("--no-", "--")]) if (name) all.add(name);
  return all;
}

const everywhere = (command: Command): Command[] => [command, ...command.commands.flatMap(everywhere)];

/** What is wrong about `holdfast VERB --option …`. */
function mistakes(text: string): string[] {
  const [, rest = ""] = /\bholdfast ([^|;&]*)/.exec(text) ?? [];
  // What follows `--` is the command of exec.
  const words = rest.split(" -- ")[0]?.split(/\s+/) ?? [];
  let command: Command = program;
  for (const word of words) {
    const sub = command.commands.find((each) => each.name() === word || each.aliases().includes(word));
    if (sub === undefined) break;
    command = sub;
  }
  const [verb = ""] = words;
  if (command === program && /^[a-z]+$/.test(verb)) return [`there is no holdfast ${verb}`];
  const known = optionsOf(command);
  const named = [...rest.split(" -- ")[0]!.matchAll(/(?<=^|[\s[(])--[a-z][a-z-]*/g)].map(
    ([option]) => option,
  );
  return named.filter((option) => !known.has(option)).map((option) => `${option} in: ${text.trim()}`);
}

test("what is said of the command is so", () => {
  const wrong: string[] = [];
  let read = 0;
  const all = new Set(everywhere(program).flatMap((command) => [...optionsOf(command)]));
  for (const file of files.filter((each) => each !== "CHANGELOG.md")) {
    const spans = [...proseOf(file).matchAll(/`([^`\n]+)`/g)].map(([, span = ""]) => span);
    const lines = blocksOf(file)
      .filter(({ language }) => ["sh", "bash", "console", ""].includes(language))
      .flatMap(({ code }) => code.split("\n"));
    for (const text of [...spans, ...lines].filter((each) => /^(\$ )?(npx )?holdfast [a-z-]/.test(each))) {
      read++;
      wrong.push(...mistakes(text).map((what) => `${file}: ${what}`));
    }
    // On the pages of the command, an option by itself is one of its own.
    if (/^docs\/(command.*|demo|doctor|certify)\.md$/.test(file))
      for (const span of spans) {
        const [option] = /^--[a-z][a-z-]*/.exec(span) ?? [];
        if (option === undefined) continue;
        read++;
        if (!all.has(option)) wrong.push(`${file}: ${option}`);
      }
  }
  expect(wrong).toEqual([]);
  expect(read).toBeGreaterThan(80);
  expect(mistakes("npx holdfast doctor --urll postgres://")).toHaveLength(1);
  expect(mistakes("holdfast queues show emails")).toHaveLength(1);
});
