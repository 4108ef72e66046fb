/** `holdfast race`, as people start it. */
import { spawn } from "node:child_process";
import { cpSync, existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import type { Turn } from "holdfast/testing";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { annotation } from "../packages/cli/src/race/annotations.ts";
import { draw } from "../packages/cli/src/race/draw.ts";
import { findingOf, placeIn } from "../packages/cli/src/race/findings.ts";
import { junitReport } from "../packages/cli/src/race/junit.ts";
import { releaseOf, transactions } from "../packages/cli/src/race/lanes.ts";
import { type Outcome as Result, couldNotRun } from "../packages/cli/src/race/outcome.ts";
import { testText } from "../packages/cli/src/race/regression.ts";
import { schedules } from "../packages/cli/src/race/schedules.ts";
import { escape, wrap } from "../packages/cli/src/race/text.ts";
import { type TestDatabase, createDatabase } from "./harness/databases.ts";
import { noPsycopg } from "./harness/python.ts";

const root = fileURLToPath(new URL("../", import.meta.url));
const quota = "test/races/command/quota.ts";

let database: TestDatabase;
let folder: string;

beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), "holdfast-race-"));
  database = await createDatabase("postgres");
});

afterAll(async () => {
  rmSync(folder, { recursive: true, force: true });
  await database?.drop();
});

interface Outcome {
  readonly code: number | null;
  readonly out: string;
  readonly err: string;
}

async function race(args: readonly string[], env: NodeJS.ProcessEnv = {}): Promise<Outcome> {
  const { HOLDFAST_URL: _, DATABASE_URL: __, DEBUG: ___, GITHUB_ACTIONS: ____, ...rest } = process.env;
  const child = spawn(
    process.execPath,
    ["--conditions=holdfast-source", "packages/cli/src/bin.ts", "race", ...args],
    { cwd: root, env: { ...rest, NO_COLOR: "1", ...env }, stdio: ["ignore", "pipe", "pipe"] },
  );
  let [out, err] = ["", ""];
  child.stdout.on("data", (chunk: Buffer) => (out += chunk.toString()));
  child.stderr.on("data", (chunk: Buffer) => (err += chunk.toString()));
  const code = await new Promise<number | null>((resolve) => child.once("close", resolve));
  return { code, out, err };
}

/** On the tests' own server. */
const raceHere = (...args: string[]) => race(args, { DATABASE_URL: database.url });

interface Told {
  readonly name: string;
  readonly export: string;
  readonly status: string;
  readonly replay?: string;
  readonly command?: string;
  readonly error?: { readonly name: string; readonly message: string };
  readonly turns?: readonly Turn[];
}

const reports = ({ code, out, err }: Outcome): { code: number | null; told: Told[] } => {
  expect(out, err).toMatch(/^\{.*\}\n$/);
  return { code, told: (JSON.parse(out) as { scenarios: Told[] }).scenarios };
};

test("--proxy: an application in another process", async ({ skip }) => {
  skip(noPsycopg() !== undefined, noPsycopg());
  const { code, told } = reports(await raceHere("test/races/command/proxied.ts", "--proxy", "0", "--json"));
  expect(told).toMatchObject([
    { name: "locked", status: "ok", coverage: "exhaustive" },
    { name: "naive", status: "race", replay: "A2B4A2" },
  ]);
  expect(code).toBe(1);
});

describe("a file with a race in it", () => {
  test("shows the schedule and how to run it again, and writes a page", async () => {
    const html = join(folder, "new/report.html");
    const { code, out, err } = await raceHere(quota, "--html", html);
    expect(code, err).toBe(1);
    expect(out).toContain("✓ quota with its row locked: ");
    expect(out).toContain("✗ naive ");
    expect(out).toContain("◄ stale");
    expect(out).toContain(`holdfast race ${quota} --only naive --replay 'A2B4A2'`);
    expect(out.trim().split("\n").at(-1)).toBe("2 scenarios: 1 ok, 1 with a race");
    // No terminal, so nothing is written over; and the password is nobody's business.
    expect(err).not.toMatch(/\r| runs · /);
    expect(err).toContain("(DATABASE_URL)");
    expect(err).not.toContain(new URL(database.url).password);

    const page = readFileSync(html, "utf8");
    expect(page).toMatch(/<svg [^]*<\/svg>/);
    expect(page).not.toMatch(/<script|https?:|\bsrc=|@import|url\((?!#)/);
    expect(page).toContain("&lt;b&gt;ada&lt;/b&gt;");
    expect(page).not.toContain("<b>");
    expect(page).toContain("Lost update on person");
    expect(page).toContain("--only naive --replay &#39;A2B4A2&#39;");
    expect(page).toContain("prefers-color-scheme: dark");
    const ids = [...page.matchAll(/ id="([^"]*)"/g)].map(([, id]) => id);
    expect(ids.length).toBe(new Set(ids).size);
    const used = [...page.matchAll(/url\(#([^)]*)\)|aria-labelledby="([^"]*)"/g)].map(([, a, b]) => a ?? b);
    expect(used.filter((id) => !ids.includes(id))).toEqual([]);
  });

  test("writes a test on request, which fails until the race is gone", async () => {
    // Where packages are found.
    const place = mkdtempSync(join(root, "test/races/written-"));
    const inPlace = (file: string) => join(place, file);
    try {
      cpSync(quota, inPlace("quota.race.ts"));
      writeFileSync(inPlace("package.json"), JSON.stringify({ type: "module" }));
      const [file, written] = [inPlace("quota.race.ts"), inPlace("quota.test.ts")];
      const { code, err } = await raceHere(file, "--write-test", written);
      expect(code, err).toBe(1);
      expect(err).toContain(`Test: ${written} (it fails until the race is gone)`);
      const text = readFileSync(written, "utf8");
      expect(text).toContain('import * as races from "./quota.race.ts";');
      expect(text).toContain('replay: "A2B4A2"');
      const run = async () => {
        const child = spawn(process.execPath, ["--conditions=holdfast-source", "--test", written], {
          env: {
            PATH: process.env["PATH"],
            DATABASE_URL: database.url,
            HOLDFAST_EXPLORE_MS: process.env["HOLDFAST_EXPLORE_MS"],
          },
          stdio: ["ignore", "pipe", "inherit"],
        });
        let out = "";
        child.stdout.on("data", (chunk: Buffer) => (out += chunk.toString()));
        return { code: await new Promise((resolve) => child.once("close", resolve)), out: () => out };
      };
      const before = await run();
      expect(before.code, before.out()).toBe(1);
      expect(before.out()).toContain("Lost update on person");
      writeFileSync(
        file,
        readFileSync(file, "utf8").replace('uploads(url, "")', 'uploads(url, " FOR UPDATE")'),
      );
      const after = await run();
      expect(after.code, after.out()).toBe(0);
      // Nothing of anybody's is written over.
      const again = await raceHere(file, "--write-test", written);
      expect(again).toMatchObject({ code: 2, err: expect.stringContaining("it is there already") });
    } finally {
      rmSync(place, { recursive: true, force: true });
    }
  });

  test.each([
    ["vitest", /^import \{ test \} from "vitest";.*"\.\.\/quota\.race\.ts".*, 30_000\);/s],
    ["jest", /^import \{ expectNoRace \}.*"\.\.\/quota\.race".*, 30_000\);/s],
    ["mocha", /^import \{ test \} from "node:test";.*"\.\.\/quota\.race\.ts"/s],
  ])("which is one of the runner's that the project has: %s", (name, expected) => {
    writeFileSync(join(folder, "package.json"), JSON.stringify({ devDependencies: { [name]: "1.0.0" } }));
    const found = [
      { key: "a-b", name: 'it "is"', replay: "A2B2", isolation: "serializable", made: true },
      { key: "plain", name: "plain", replay: "AB", isolation: undefined, made: false },
    ];
    const text = testText(found, join(folder, "quota.race.ts"), join(folder, "tests/quota.test.ts"));
    expect(text).toMatch(expected);
    expect(text).toContain('const scenario = await races["a-b"]({ url: url() });');
    expect(text).toContain(
      String.raw`await expectNoRace({ ...scenario, name: "it \"is\"", isolation: "serializable", replay: "A2B2" });`,
    );
    expect(text).toContain("const scenario = races.plain;");
  });

  test("as JSON, and the order that it names fails again", async () => {
    const { code, told } = reports(await raceHere(quota, "--json", "--isolation", "read", "committed"));
    expect(code).toBe(1);
    expect(told.map(({ name, status }) => [name, status])).toEqual([
      ["quota with its row locked", "ok"],
      ["naive", "race"],
    ]);
    const [, naive] = told;
    expect(naive).toMatchObject({
      export: "naive",
      ok: false,
      isolation: "read committed",
      anomaly: "lost update",
      error: { name: "AssertionError" },
      command: `holdfast race ${quota} --only naive --isolation read-committed --replay '${naive?.replay}'`,
    });
    expect(naive?.turns?.length).toBeGreaterThan(4);
    const again = ["--only", "naive", "--replay", naive?.replay ?? "", "--isolation", "read-committed"];
    expect(reports(await raceHere(quota, "--json", ...again))).toMatchObject({
      code: 1,
      told: [{ name: "naive", runs: 1, replay: naive?.replay }],
    });
  });

  test("--only finds the fix alone, by its own name, and leaves the database as it was", async () => {
    const { code, out, err } = await raceHere(quota, "--only", "quota with its row locked");
    expect(code, err).toBe(0);
    expect(out).not.toContain("naive");
    expect(out.trim().split("\n").at(-1)).toBe("1 scenario: 1 ok");
    const nave = await raceHere(quota, "--only", "nave");
    expect(nave).toMatchObject({ code: 2, out: "" });
    expect(nave.err).toContain("has no scenario nave; it has locked, naive");
  });
});

/** As far as an XML parser would refuse it: elements that do not end, characters and references that may not be there. */
function expectWellFormed(xml: string): void {
  // oxlint-disable-next-line no-control-regex -- these are what is looked for.
  expect(xml).not.toMatch(/[\u0000-\u0008\u000b\u000c\u000e-\u001f]|&(?!(?:lt|gt|amp|quot|#39|#10);)/);
  const open: string[] = [];
  const body = xml.replace(/^<\?xml [^?]*\?>\n/, "");
  const tag = /<(\/?)([\w-]+)((?: [\w:-]+="[^"<]*")*)(\/?)>/y;
  for (let at = body.indexOf("<"); at >= 0; at = body.indexOf("<", tag.lastIndex)) {
    tag.lastIndex = at;
    const [found, ends, name = "", , empty] = tag.exec(body) ?? [];
    expect(found, body.slice(at, at + 60)).toBeDefined();
    if (ends) expect(open.pop()).toBe(name);
    else if (!empty) open.push(name);
  }
  expect(open).toEqual([]);
}

const attributesOf = (tag: string) =>
  Object.fromEntries([...tag.matchAll(/ ([\w-]+)="([^"]*)"/g)].map(([, name, value]) => [name, value]));
const elements = (xml: string, name: string) =>
  [...xml.matchAll(new RegExp(`<${name}[ >][^>]*`, "g"))].map(([tag]) => attributesOf(tag));

interface SarifRun {
  readonly tool: { readonly driver: { readonly name: string; readonly rules: { readonly id: string }[] } };
  readonly invocations: readonly object[];
  readonly automationDetails: { readonly id: string };
  readonly results: readonly {
    readonly ruleId: string;
    readonly ruleIndex: number;
    readonly level: string;
    readonly message: { readonly text: string };
    readonly locations: readonly { readonly physicalLocation: object }[];
    readonly codeFlows?: readonly {
      readonly threadFlows: readonly {
        readonly id: string;
        readonly locations: { executionOrder: number }[];
      }[];
    }[];
  }[];
}

function sarif(file: string): SarifRun {
  const { $schema, version, runs } = JSON.parse(readFileSync(file, "utf8"));
  expect({ $schema, version, runs: runs.length }).toEqual({
    $schema: "https://json.schemastore.org/sarif-2.1.0.json",
    version: "2.1.0",
    runs: 1,
  });
  const run: SarifRun = runs[0];
  for (const { ruleId, ruleIndex, level } of run.results) {
    expect(run.tool.driver.rules[ruleIndex]?.id).toBe(ruleId);
    expect(level).toMatch(/^(?:error|warning)$/);
  }
  return run;
}

describe("reports for CI", () => {
  const line =
    1 +
    readFileSync(join(root, quota), "utf8")
      .split("\n")
      .findIndex((text) => text.includes("client.query<{ used"));

  test("a race: JUnit, SARIF, SVG and annotations name the read that was stale", async () => {
    const [xml, json, drawn] = [
      join(folder, "ci/race.xml"),
      join(folder, "race.sarif"),
      join(folder, "drawn"),
    ];
    const args = [quota, "--junit", xml, "--sarif", json, "--svg", drawn];
    const { code, out, err } = await race(args, { DATABASE_URL: database.url, GITHUB_ACTIONS: "true" });
    expect(code, err).toBe(1);
    for (const file of [xml, json, join(drawn, "naive.svg")]) expect(err).toContain(`Report: ${file}\n`);

    const place = `file=${quota},line=${line},col=`;
    expect(out.match(/^::.*$/gm)).toEqual([
      expect.stringMatching(
        /^::error file=[^,]*,line=\d+,col=\d+,title=Lost update on person%3A naive::2 uploads/,
      ),
    ]);
    expect(out).toContain(`::error ${place}`);
    expect(out).toMatch(/ 1%0A%0ADecide in the write itself .*%0Aholdfast race .* --replay 'A2B4A2'\n/);

    const junit = readFileSync(xml, "utf8");
    expectWellFormed(junit);
    const counts = {
      tests: "2",
      failures: "1",
      errors: "0",
      skipped: "0",
      time: expect.stringMatching(/^\d+\.\d{3}$/),
    };
    expect(elements(junit, "testsuites")).toEqual([{ name: "holdfast race", ...counts }]);
    expect(elements(junit, "testsuite")).toEqual([{ name: quota, ...counts }]);
    expect(elements(junit, "testcase")).toMatchObject([
      { name: "quota with its row locked", classname: quota, file: quota },
      { name: "naive", classname: quota, file: quota },
    ]);
    expect(elements(junit, "failure")).toEqual([
      { message: "Lost update on person: naive", type: "lost-update" },
    ]);
    expect(junit).toContain("--replay &#39;A2B4A2&#39;</failure>");

    const { tool, invocations, automationDetails, results } = sarif(json);
    expect(tool.driver).toMatchObject({ name: "holdfast race", rules: [{ id: "lost-update" }] });
    expect(invocations).toEqual([{ executionSuccessful: true, exitCode: 1 }]);
    expect(automationDetails).toEqual({ id: `holdfast-race/${quota}/` });
    expect(results).toMatchObject([
      {
        level: "error",
        message: {
          text: expect.stringContaining("Lost update on person: naive\n2 uploads of 60 fit into 100"),
        },
        locations: [
          {
            physicalLocation: {
              artifactLocation: { uri: quota, uriBaseId: "%SRCROOT%" },
              region: { startLine: line, startColumn: expect.any(Number) },
            },
          },
        ],
        partialFingerprints: { "holdfastRace/v1": "naive:lost-update" },
      },
    ]);
    const flows = results[0]?.codeFlows?.[0]?.threadFlows ?? [];
    expect(
      flows.map(({ id, locations }) => [id, locations.map(({ executionOrder }) => executionOrder)]),
    ).toEqual([
      ["A", [1, 2, 7, 8]],
      ["B", [3, 4, 5, 6]],
    ]);

    const svg = readFileSync(join(drawn, "naive.svg"), "utf8");
    expectWellFormed(svg);
    expect(svg).toMatch(/^<svg xmlns="http:\/\/www\.w3\.org\/2000\/svg" /);
    expect(svg).toContain("prefers-color-scheme: dark");
    expect(svg).toContain("Lost update on person");
    expect(svg).toContain("◄ stale: it changed before it was used");
    expect(svg.replace("http://www.w3.org/2000/svg", "")).not.toMatch(
      /<script|https?:|href=|@import|@font-face|url\((?!#)/,
    );
  });

  test("what could not run is an error, and what was not run is skipped", async () => {
    const [xml, json] = [join(folder, "error.xml"), join(folder, "error.sarif")];
    const objects = "test/races/command/objects.ts";
    const args = [objects, "--bail", "--json", "--annotations", "--junit", xml, "--sarif", json];
    const outcome = await raceHere(...args, "--svg", join(folder, "none.svg"));
    expect(reports(outcome).code).toBe(2);
    // Stdout is one document.
    expect(outcome.err).toMatch(
      /^::error file=test\/races\/command\/objects\.ts,line=1,col=1,title=Could not run%3A alone::.*two actors/m,
    );
    const junit = readFileSync(xml, "utf8");
    expectWellFormed(junit);
    expect(elements(junit, "testsuites")).toMatchObject([
      { tests: "2", failures: "0", errors: "1", skipped: "1" },
    ]);
    expect(elements(junit, "error")).toEqual([{ message: "Could not run: alone", type: "could-not-run" }]);
    expect(junit).toMatch(/name="likes of a post" [^>]*><skipped\/>/);
    const { results, invocations } = sarif(json);
    expect(results).toMatchObject([{ ruleId: "could-not-run", level: "error" }]);
    expect(invocations).toEqual([{ executionSuccessful: false, exitCode: 2 }]);
    expect(existsSync(join(folder, "none.svg"))).toBe(false);
  });

  test("less coverage than was asked for is a failure, with what was never interleaved", async () => {
    const [xml, json, html] = [
      join(folder, "less.xml"),
      join(folder, "less.sarif"),
      join(folder, "less.html"),
    ];
    const args = [
      quota,
      "--only",
      "naive",
      "--preemptions",
      "0",
      "--junit",
      xml,
      "--sarif",
      json,
      "--html",
      html,
      "--json",
    ];
    const env = { DATABASE_URL: database.url, GITHUB_ACTIONS: "true" };
    const { code, out, err } = await race([...args, "--min-coverage", "1"], env);
    expect(code).toBe(2);
    expect(err).toMatch(
      /^::warning .*title=Not enough orders were tried%3A naive::.*3 pairs of statements were never interleaved/m,
    );
    expect(elements(readFileSync(xml, "utf8"), "failure")).toMatchObject([{ type: "coverage" }]);
    expect(sarif(json).results).toMatchObject([{ ruleId: "coverage", level: "warning" }]);
    const pairs = [
      ["SELECT", "UPDATE"],
      ["UPDATE", "SELECT"],
      ["UPDATE", "UPDATE"],
    ].map((texts) => ({
      table: "person",
      statements: texts.map((text, i) => ({
        actor: "AB"[i],
        statement: expect.stringMatching(`^${text} `),
        place: expect.stringMatching(/quota\.ts:\d+:\d+$/),
      })),
    }));
    expect(JSON.parse(out).scenarios).toMatchObject([
      { error: { name: "CoverageError", unexplored: pairs } },
    ]);
    expect(readFileSync(html, "utf8")).toContain("3 pairs of statements never interleaved");

    const passed = await race([...args, "--min-coverage", "0", "--no-annotations"], env);
    expect(passed.err).not.toContain("::");
    expect(passed.code).toBe(0);
    expect(JSON.parse(passed.out).scenarios).toMatchObject([{ status: "ok", unexplored: pairs }]);
    expect(readFileSync(html, "utf8")).toMatch(
      /<th scope="row">person<\/th><td><strong>A<\/strong> <code>SELECT used/,
    );
  });

  test("the picture in docs/races.md is what the command draws", async () => {
    const file = join(folder, "race.svg");
    const { code, err } = await raceHere("examples/race/scenarios.ts", "--only", "naive", "--svg", file);
    expect(code, err).toBe(1);
    await expect(readFileSync(file, "utf8")).toMatchFileSnapshot(join(root, "docs/race.svg"));
  });

  test("each race has its picture", () => {
    const turns = [turn(1, "A", "BEGIN")];
    const found = (key: string, ok = false) =>
      ({
        key,
        name: key,
        status: ok ? "ok" : "race",
        report: { ok, turns, actors: ["A"] },
      }) as unknown as Result;
    const outcomes = [
      found("fine", true),
      found("one"),
      found("two/../3"),
      couldNotRun({ key: "x", name: "x" }, ""),
    ];
    expect(Object.keys(schedules("a/b.svg", outcomes))).toEqual(["a/b.svg", "a/b-two-..-3.svg"]);
    expect(Object.keys(schedules("a", outcomes))).toEqual([join("a", "one.svg"), join("a", "two-..-3.svg")]);
    expect(schedules("a.svg", [found("<b>")])["a.svg"]).toContain("✗ &lt;b&gt;");
  });

  test("whatever names and messages hold, no report is broken by it", () => {
    const evil = couldNotRun(
      { key: "a", name: 'a, "b": <c>\n100%\u0000' },
      new Error("\u001b[31mred\u001b[39m & ]]> \u0007\r\n::error::50%"),
    );
    const xml = junitReport("x.ts", [evil], ["<d>\u001b[1m"]);
    expectWellFormed(xml);
    expect(elements(xml, "testcase").map(({ name }) => name)).toEqual([
      "a, &quot;b&quot;: &lt;c&gt;&#10;100%\u{fffd}",
      "&lt;d&gt;",
    ]);
    expect(xml).toContain(">red &amp; ]]&gt; \u{fffd}");
    const finding = findingOf("x,y.ts", evil);
    expect(finding && annotation(finding)).toBe(
      '::error file=x%2Cy.ts,line=1,col=1,title=Could not run%3A a%2C "b"%3A <c>%0A100%25\u0000::red & ]]> \u0007%0D%0A::error::50%25',
    );
    // Not in the repository: a place that no tool could show.
    expect(placeIn("/elsewhere/a.ts:1:2")).toBeUndefined();
    expect(placeIn(`${join(root, "test/a b.ts")}:3:4`)).toEqual({ file: "test/a b.ts", line: 3, column: 4 });
  });
});

test("without a URL it brings a server of its own", async () => {
  const { code, out, err } = await race([quota, "--only", "naive"]);
  expect(code, out + err).toBe(1);
  expect(err).toContain("on a PostgreSQL of its own");
});

test("scenarios on what DATABASE_URL says; one that cannot run does not hide the others", async () => {
  const env = { DATABASE_URL: database.url };
  const { code, told } = reports(await race(["test/races/command/objects.ts", "--json"], env));
  expect(code).toBe(2);
  expect(told).toMatchObject([
    { name: "alone", status: "error", error: { message: expect.stringContaining("two actors") } },
    { name: "likes of a post", export: "likes", status: "ok", coverage: "exhaustive" },
  ]);
  const bailed = await race(["test/races/command/objects.ts", "--bail"], env);
  expect(bailed.code).toBe(2);
  expect(bailed.out).toContain("2 scenarios: 1 could not run, 1 not run");
});

test("less than was asked for is not ok", async () => {
  const locked = [quota, "--only", "locked"];
  const env = { DATABASE_URL: database.url };
  expect((await race([...locked, "--min-coverage", "exhaustive"], env)).code).toBe(0);
  const less = [...locked, "--preemptions", "0", "--min-coverage"];
  const { code, told } = reports(await race([...less, "2", "--json"], env));
  expect(code).toBe(2);
  expect(told).toMatchObject([
    { status: "error", error: { message: expect.stringMatching(/not all orders with up to 2 switches/) } },
  ]);
  expect((await race([...less, "0"], env)).code).toBe(0);
});

describe("what cannot be run ends with 2, and says why", () => {
  test.each([
    ["no file", ["nowhere.ts"], "There is no file nowhere.ts."],
    ["no scenario", ["test/races/command/none.ts"], "export const quota = ({ url }) => {"],
    ["several to replay", [quota, "--replay", "A2B2"], "--only which one (locked, naive)"],
    ["no number", [quota, "--preemptions", "few"], "whole number from 0"],
    [
      "no coverage",
      [quota, "--min-coverage", "most"],
      '"exhaustive", or a number of switches, from 0 to 999',
    ],
    ["no order", [quota, "--replay", "2A"], "A2B4A2"],
    ["no level", [quota, "--isolation", "snapshot"], "read-committed"],
    ["no option", [quota, "--what"], "holdfast race --help"],
    ["no argument", [], "missing required argument"],
  ] as const)("%s", async (_, args, why) => {
    const { code, out, err } = await race(args);
    expect({ code, out }).toEqual({ code: 2, out: expect.not.stringContaining("✓") });
    expect(out + err).toMatch(why);
  });
});

const turn = (n: number, actor: string, statement: string, more: Partial<Turn> = {}): Turn => ({
  n,
  actor,
  statement,
  rows: [],
  waitsFor: [],
  switched: false,
  stale: false,
  ...more,
});

describe("the picture", () => {
  const waiting = [
    turn(1, "A", "BEGIN"),
    turn(2, "A", "UPDATE a"),
    turn(3, "B", "BEGIN", { switched: true }),
    turn(4, "B", "UPDATE a", { waitsFor: ["A"] }),
    turn(5, "A", "ROLLBACK TO SAVEPOINT s"),
    turn(6, "A", "COMMIT"),
    turn(7, "B", "COMMIT"),
  ];
  const knot = [
    turn(1, "A", "UPDATE b", { waitsFor: ["B"], error: "deadlock detected" }),
    turn(2, "B", "UPDATE a", { waitsFor: ["A"] }),
    turn(3, "B", "COMMIT"),
    turn(4, "A", "ROLLBACK"),
  ];

  test("knows who let go, and when", () => {
    expect(releaseOf(waiting, 1)).toBeUndefined();
    expect(releaseOf(waiting, 3)).toEqual({ at: 5, below: false, by: "A" });
    expect(releaseOf(knot, 0)).toEqual({ at: 1, below: true, by: undefined });
    expect(releaseOf(knot, 1)).toEqual({ at: 1, below: true, by: "A" });
    expect(transactions(waiting)).toEqual([
      { actor: "A", from: 0, to: 5 },
      { actor: "B", from: 2, to: 6 },
    ]);
  });

  test.each([
    ["wide", 960, false],
    ["narrow", 340, true],
  ])("%s: nothing lies over anything else, or outside", (_, width, narrow) => {
    const long = `SELECT ${"x".repeat(500)} FROM 漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字 ${"and so on ".repeat(50)}`;
    const turns = [
      ...waiting,
      turn(8, "B", long, { rows: [["1", "<i>"]], stale: true, place: "/a/b.ts:1:2" }),
    ];
    const svg = draw({ turns, actors: ["A", "B"], width, narrow, id: "x" });
    expect(svg).toContain("&lt;i&gt;");
    expect(svg).toContain(">b.ts:1<");
    expect(svg).toContain("…");
    const number = (text: string, name: string) => Number(new RegExp(` ${name}="([^"]*)"`).exec(text)?.[1]);
    const boxes = [...svg.matchAll(/<g class="step.*?<\/g>/gs)].map(([text]) => {
      const [rect = ""] = /<rect .*?>/.exec(text) ?? [];
      const lines = [...text.matchAll(/<tspan.*?<\/tspan>/gs)].map(([line]) => number(line, "y"));
      const [x, y] = [number(rect, "x"), number(rect, "y")];
      return { x, y, right: x + number(rect, "width"), bottom: y + number(rect, "height"), lines };
    });
    expect(boxes).toHaveLength(turns.length);
    for (const [i, box] of boxes.entries()) {
      expect(box.right).toBeLessThanOrEqual(Math.min(width, number(svg, "width")));
      expect(box.y).toBeGreaterThan(boxes[i - 1]?.bottom ?? 0);
      expect(box.lines.every((y) => y > box.y && y < box.bottom)).toBe(true);
    }
    expect(boxes.at(-1)?.bottom).toBeLessThan(number(svg, "height"));
  });

  test("breaks text where it may, and says where something is left out", () => {
    expect(wrap("UPDATE quota SET remaining = 0", 12, 9)).toEqual([
      "UPDATE quota",
      "SET",
      "remaining =",
      "0",
    ]);
    expect(wrap("abcdefghij", 4, 2)).toEqual(["abcd", "efg…"]);
    expect(wrap("漢字漢字", 4, 9)).toEqual(["漢字", "漢字"]);
    expect(wrap("  ", 4, 9)).toEqual([]);
    expect(escape("<a href='x'>&\"\u0000")).toBe("&lt;a href=&#39;x&#39;&gt;&amp;&quot;\u{fffd}");
  });
});
