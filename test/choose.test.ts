/** `holdfast choose`: three questions, one answer, in the terminal and in docs/choose.md. */
import { execFile } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { format } from "prettier";
import { expect, test } from "vitest";
import { type Need, lacking } from "../packages/cli/src/choose/answers.ts";
import {
  type Answer,
  type Asked,
  choose,
  databases,
  longs,
  whats,
} from "../packages/cli/src/choose/index.ts";
import { command, root } from "./harness/command.ts";
import { terminal } from "./harness/terminal.ts";

const all: readonly Asked[] = whats.flatMap(({ name: what }) =>
  longs.flatMap(({ name: long }) => databases.map(({ name: database }) => ({ what, long, database }))),
);

const docs = (file: string): string => readFileSync(`${root}docs/${file}`, "utf8");

test("every combination has an answer", () => {
  expect(all).toHaveLength(216);
  for (const asked of all) {
    const { use, why, code, page } = choose(asked);
    for (const text of [use, why, code, page]) expect(text, JSON.stringify(asked)).not.toBe("");
  }
});

/** Rows of the table that capabilities.test.ts writes from what the engines say themselves. */
const rowOf: Readonly<Record<Need, string>> = {
  transactionLocks: "`hf.transaction({ lock })`",
  rowLocks: "`tx.rows`",
  leases: "`hf.lease`",
  versions: "`versioned`",
  once: "`once`",
  quotas: "`quota`",
  stock: "`stock`",
  queues: "`queue`",
  schedules: "`schedule`",
};

/** What is needed for what the code calls: an answer that forgot to say so would be let through. */
const calls: readonly (readonly [RegExp, Need])[] = [
  [/lock: |tryLock\(/, "transactionLocks"],
  [/tx\.rows?\b/, "rowLocks"],
  [/hf\.lease\(/, "leases"],
  [/versioned</, "versions"],
  [/\bonce\(/, "once"],
  [/\bquota\(/, "quotas"],
  [/\bstock\(/, "stock"],
  [/\bqueue</, "queues"],
  [/\bschedule\(/, "schedules"],
];

test("no answer needs what the engine says that it lacks", () => {
  const lines = docs("capabilities.md").split("\n");
  const cells = (line = ""): string[] => line.split("|").map((cell) => cell.trim());
  const head = cells(lines.find((line) => line.includes("| PostgreSQL |")));
  const lacks = (database: string, need: Need): boolean => {
    const row = cells(lines.find((line) => line.startsWith(`| ${rowOf[need]}`)));
    const name = databases.find((each) => each.name === database)?.text ?? "";
    const cell = row[head.indexOf(name)];
    expect(["yes", "no"], `${database}: ${need}`).toContain(cell);
    return cell === "no";
  };
  const needs = Object.keys(rowOf) as Need[];
  for (const { name } of databases)
    expect(lacking[name] ?? [], name).toEqual(needs.filter((need) => lacks(name, need)));
  for (const asked of all) {
    const { needs: said, code } = choose(asked);
    const used = calls.filter(([call]) => call.test(code)).map(([, need]) => need);
    for (const need of new Set([...said, ...used]))
      expect(lacks(asked.database, need), JSON.stringify(asked)).toBe(false);
  }
});

test("every code compiles, as a module of its own", async () => {
  const folder = mkdtempSync(join(tmpdir(), "holdfast-choose-"));
  try {
    symlinkSync(join(root, "node_modules"), join(folder, "node_modules"));
    const codes = [...new Set(all.map((asked) => choose(asked).code))];
    expect(codes.length).toBeGreaterThan(80);
    for (const [i, code] of codes.entries()) writeFileSync(join(folder, `answer-${i}.ts`), `${code}\n`);
    // That they are looked at.
    writeFileSync(join(folder, "wrong.ts"), (codes[0] ?? "").replace("tryConsume(", "tryConsum("));
    writeFileSync(join(folder, "package.json"), JSON.stringify({ type: "module" }));
    writeFileSync(
      join(folder, "tsconfig.json"),
      JSON.stringify({
        compilerOptions: {
          module: "nodenext",
          target: "es2024",
          lib: ["es2024", "esnext.disposable", "esnext.collection"],
          strict: true,
          noEmit: true,
          noUnusedLocals: true,
          skipLibCheck: true,
          types: ["node"],
          allowImportingTsExtensions: true,
          customConditions: ["holdfast-source"],
        },
        include: ["*.ts"],
      }),
    );
    const output = await new Promise<string>((resolve) => {
      execFile(join(root, "node_modules/.bin/tsc"), ["-p", folder], { timeout: 300_000 }, (_, stdout) =>
        resolve(stdout),
      );
    });
    const errors = output.split("\n").filter((line) => line.includes("error TS"));
    expect(errors.filter((line) => !line.includes("wrong.ts"))).toEqual([]);
    expect(errors.join("\n")).toContain("'tryConsum' does not exist");
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
});

test("the pages that it names are there", () => {
  const pages = new Set(all.map((asked) => choose(asked).page));
  for (const page of pages) {
    const [file = "", place] = page.split("#");
    const titles = [...docs(file).matchAll(/^#+ (.*)$/gm)].map(([, title = ""]) =>
      title
        .toLowerCase()
        .replaceAll(/[^\w\- ]/g, "")
        .replaceAll(" ", "-"),
    );
    if (place !== undefined) expect(titles, page).toContain(place);
  }
});

/** `HOLDFAST_WRITE_DOCS=1` writes it anew. */
test("docs/choose.md has the same answers", async () => {
  const cell = (what: Asked["what"], long: Asked["long"]): string => {
    const { use, page } = choose({ what, long, database: "postgres" });
    const code = /[(]/.test(use) ? `\`${use}\`` : use;
    return `[${code}](${page.replace(/^choose\.md/, "")})`;
  };
  const rows = whats.map(({ name, text }) => [
    `${text} (\`${name}\`)`,
    ...longs.map(({ name: long }) => cell(name, long)),
  ]);
  const table = [
    ["what is checked", ...longs.map(({ name, text }) => `${text} (\`${name}\`)`)],
    ["---", ...longs.map(() => "---")],
    ...rows,
  ];
  const generated = table.map((row) => `| ${row.join(" | ")} |`).join("\n");
  const text = docs("choose.md");
  const [before, rest = ""] = text.split("<!-- generated: chooser -->");
  const after = rest.slice(rest.indexOf("<!-- end -->"));
  const wanted = await format(`${before}<!-- generated: chooser -->\n\n${generated}\n\n${after}`, {
    parser: "markdown",
    printWidth: 110,
    proseWrap: "preserve",
  });
  if (process.env["HOLDFAST_WRITE_DOCS"] === "1") await writeFile(`${root}docs/choose.md`, wanted);
  else expect(text).toBe(wanted);
});

test("in a terminal: by number and by name, asked again if it was neither", async () => {
  const shown = terminal(["choose"], { columns: 80 });
  await shown.until(/What is checked[\s\S]*>\s*$/);
  shown.type("99\r");
  await shown.until("A number from 1 to 12, or one of the names.");
  shown.type("1\r");
  await shown.until(/How long[\s\S]*>\s*$/);
  shown.type("stat\r");
  await shown.until(/Which database[\s\S]*>\s*$/);
  shown.type("4\r");
  expect(await shown.ended).toBe(0);
  const screen = await shown.all();
  const answer = choose({ what: "limit", long: "statements", database: "sqlite" });
  expect(screen).toContain(`Use ${answer.use}`);
  expect(screen).toContain('import { DatabaseSync } from "node:sqlite";');
  expect(screen).toContain("tryConsume(userId, 1, { id: requestId })");
  expect(screen).toContain("More: docs/quota.md");
});

test("Ctrl-C stops it", async () => {
  const shown = terminal(["choose"], { columns: 80 });
  await shown.until(/What is checked[\s\S]*>\s*$/);
  shown.type("\x03");
  expect(await shown.ended).toBe(130);
});

test("without a terminal: all of it by options", async () => {
  const args = ["choose", "--what", "rows", "--long", "statements", "--database"];
  const { code, out, err } = await command([...args, "duckdb", "--json"]);
  expect(code, err).toBe(0);
  const { asked, ...answer } = JSON.parse(out) as Answer & { asked: Asked };
  expect(asked).toEqual({ what: "rows", long: "statements", database: "duckdb" });
  expect(answer).toEqual(choose(asked));
  const missing = await command(["choose", "--what", "rows"]);
  expect([missing.code, missing.out]).toEqual([2, ""]);
  expect(missing.err).toContain("add --long with one of statements, seconds, minutes");
  const wrong = await command([...args, "oracle"]);
  expect(wrong.code).toBe(2);
  expect(wrong.err).toContain("Allowed choices are postgres, mysql, mariadb, sqlite, libsql, duckdb");
});
