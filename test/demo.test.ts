/** `holdfast demo`, which is what `npm start` runs: people look before they read. */
import { mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, chmodSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Client } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type Outcome, command, root, start } from "./harness/command.ts";
import { serverUrl } from "./harness/databases.ts";
import { terminal } from "./harness/terminal.ts";
import { eventually } from "./harness/wait.ts";

interface Way {
  readonly way: string;
  readonly verdict: "exact" | "wrong" | "failed" | "lucky";
  readonly counted: number;
  readonly expected: number;
  readonly text: string;
  readonly code: readonly string[];
  readonly failed: Readonly<Record<string, number>>;
  readonly facts: Readonly<Record<string, number>>;
  readonly opsPerSecond?: number;
  readonly p50Ms?: number;
  readonly p99Ms?: number;
}

interface Race {
  readonly race: string;
  readonly title: string;
  readonly what: string;
  readonly ways: readonly Way[];
}

interface Facts {
  readonly exact: boolean;
  readonly processes: number;
  readonly callers: number;
  readonly races: readonly Race[];
}

const names = ["quota", "last-item", "transfers", "jobs", "cron"];
const marks = { exact: "✓", wrong: "✗", failed: "!", lucky: "~" } as const;
/** What each race is fixed by, in the order in which it is shown: the best one last. */
const tools: Readonly<Record<string, readonly string[]>> = {
  quota: ["lock", "quota"],
  "last-item": ["lock", "stock"],
  transfers: ["rows"],
  jobs: ["queue"],
  cron: ["schedule"],
};
const waysOf = ({ races }: Facts): Way[] => races.flatMap(({ ways }) => ways);
/** Where nothing is, and what must not be looked at. */
const nowhere = "postgres://nobody@127.0.0.1:1/none";

let folder: string;
let admin: Client;

beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), "holdfast-demo-test-"));
  // The servers of the demo do not run as root.
  chmodSync(folder, 0o755);
  temp = join(folder, "temp");
  mkdirSync(temp);
  chmodSync(temp, 0o777);
  admin = new Client({ connectionString: serverUrl("postgres") });
  await admin.connect();
});

afterAll(async () => {
  await admin?.end();
  rmSync(folder, { recursive: true, force: true });
});

/** Of the servers of these runs, so that what they leave behind can be told from that of others. */
let temp: string;

/** Programs that had to be copied stay, for the next run. */
const leftOf = (dir: string): string[] =>
  readdirSync(dir).filter((name) => !name.startsWith("holdfast-embedded-"));

/** Processes that have the directory of a server among their arguments. */
function processesOf(dir: string): string[] {
  return readdirSync("/proc")
    .filter((pid) => /^\d+$/.test(pid))
    .flatMap((pid) => {
      try {
        const line = readFileSync(`/proc/${pid}/cmdline`, "utf8").replaceAll("\0", " ");
        return line.includes(dir) ? [`${pid} ${line}`] : [];
      } catch {
        return [];
      }
    });
}

async function demoDatabases(): Promise<string[]> {
  const { rows } = await admin.query<{ datname: string }>(
    "SELECT datname FROM pg_database WHERE datname LIKE 'holdfast\\_demo\\_%'",
  );
  return rows.map(({ datname }) => datname);
}

const here = (...args: string[]) => command(["demo", "--url", serverUrl("postgres"), ...args]);

/** Figures differ from run to run, and with them the width of the table's columns. Code and codes of errors do not. */
function masked(screen: string, { races }: Facts): string {
  const code = races.flatMap(({ ways }) => ways.flatMap((way) => way.code));
  let inTable = false;
  return screen
    .split("\n")
    .map((line) => {
      if (code.some((each) => line.endsWith(each))) return line;
      inTable = line.startsWith("written ") || (inTable && line !== "");
      const figures = line.replaceAll(/(?<!\w)(?!40001\))\d+(?:\.\d+)?(?!\w)/g, "#");
      const text = inTable ? figures.replaceAll(/(?<=\S) {2,}/g, "  ").replaceAll(/─+/g, "───") : figures;
      // Whether naive code was wrong, and how, is a matter of luck.
      return text.replace(/ [✗~!] .*$/, " ✗ …");
    })
    .join("\n");
}

describe("all of it, in a terminal, on a server of its own", () => {
  let all: string;
  let code: number;
  let moving: string;
  let page: string;
  let facts: Facts;

  beforeAll(async () => {
    const html = join(folder, "new/demo.html");
    const shown = terminal(["demo", "--html", html], {
      columns: 80,
      env: { HOLDFAST_URL: nowhere, DATABASE_URL: nowhere, TMPDIR: temp },
    });
    moving = await shown.until(/[█░]{24} {2}\d+\/\d+ calls/);
    code = await shown.ended;
    all = await shown.all();
    page = readFileSync(html, "utf8");
    facts = JSON.parse(/id="facts">(.*)<\/script>/.exec(page)?.[1] ?? "null") as Facts;
  });

  test("ends well, and says what it is about as it always does", async () => {
    expect(code, all).toBe(0);
    const screen = masked(all.replace(/^Page: .*$/m, "Page: demo.html"), facts);
    await expect(`${screen}\n`).toMatchFileSnapshot("screens/demo.txt");
    // Nothing is cut by a terminal of 80 columns, but for words of luck.
    const wide = all.split("\n").filter((line) => line.length >= (line.includes("by luck") ? 100 : 80));
    expect(wide.filter((line) => !line.startsWith("Page: "))).toEqual([]);
  });

  test("every race is exact with Holdfast, and wrong without, unless that is called luck", () => {
    expect(facts.exact).toBe(true);
    expect(facts.races.map(({ race }) => race)).toEqual(names);
    for (const { race, ways } of facts.races) {
      const [naive] = ways;
      const ours = ways.filter(({ way }) => way.startsWith("Holdfast"));
      expect(ours.map(({ way }) => way)).toEqual(tools[race]?.map((tool) => `Holdfast ${tool}`));
      for (const way of ours) {
        expect(way, race).toMatchObject({ verdict: "exact", failed: {} });
        expect(way.counted, race).toBe(way.expected);
      }
      expect(naive?.way).toBe("naive");
      if (naive?.verdict === "lucky") {
        expect(all).toContain("(by luck, this time)");
        continue;
      }
      expect(naive?.verdict, race).toBe("wrong");
      if (race === "transfers") {
        expect(naive?.failed["40P01"]).toBeGreaterThan(0);
        expect(naive?.counted).toBeLessThan(naive?.expected ?? 0);
      } else expect(naive?.counted, race).toBeGreaterThan(naive?.expected ?? Infinity);
    }
    // Deadlocks lose no money, either way.
    for (const { facts: each } of facts.races[2]?.ways ?? []) expect(each["money"]).toBe(each["moneyDue"]);
    expect(facts.races[4]?.ways[0]?.facts["mostOfOne"]).toBe(facts.processes);
  });

  test("SERIALIZABLE lets nothing through, and leaves the rest to the caller", () => {
    const way = waysOf(facts).find((each) => each.way === "SERIALIZABLE");
    expect(way?.counted).toBeLessThanOrEqual(way?.expected ?? 0);
    expect(Object.keys(way?.failed ?? {})).toContain("40001");
  });

  test("what it says is what was counted", () => {
    const lines = all.split("\n").map((line) => line.trim());
    const table = lines.slice(lines.findIndex((line) => line.startsWith("written ")));
    expect(table.length).toBeGreaterThan(waysOf(facts).length);
    const shown = (ms = Number.NaN): string => (ms < 10 ? ms.toFixed(1) : String(Math.round(ms)));
    for (const { race, what, ways } of facts.races) {
      expect(all.replaceAll(/\s+/g, " ")).toContain(what);
      for (const { way, verdict, text, code: written, opsPerSecond, p50Ms, p99Ms } of ways) {
        for (const line of written) expect(all).toContain(line);
        const said = `${marks[verdict]} ${text}${verdict === "lucky" ? " (by luck, this time)" : ""}`;
        expect(lines).toContain(said);
        const speed = opsPerSecond === undefined ? [] : [String(Math.round(opsPerSecond))];
        const name = way === "naive" ? `${race}: naive` : way;
        const row = [name, said, ...speed, `${shown(p50Ms)}/${shown(p99Ms)}`];
        expect(table.map((line) => line.split(/ {2,}/))).toContainEqual(row);
      }
    }
  });

  test("the code that it shows is the code that it runs", () => {
    const dir = join(root, "packages/cli/src/demo");
    const lines = new Set(
      readdirSync(dir)
        .flatMap((file) => readFileSync(join(dir, file), "utf8").split("\n"))
        .map((line) => line.trim()),
    );
    for (const { code: shown } of waysOf(facts)) {
      expect(shown.length).toBeGreaterThan(0);
      // One that is only in the list of what is shown is in quotes there.
      expect(shown.filter((line) => !line.startsWith("//") && !lines.has(line.trim()))).toEqual([]);
    }
  });

  test("bars move while it runs, and none is left", () => {
    expect(moving).toContain("naive");
    expect(all).not.toMatch(/[█░]/);
    expect(all).not.toContain("Starting");
  });

  test("the page needs nothing else, and says the same", () => {
    expect(page).toContain(`content="default-src 'none'; style-src 'unsafe-inline'"`);
    expect(page.match(/(?:src|href|action)="(?!#)[^"]*"|url\(|@import|https?:/g) ?? []).toEqual([]);
    expect(page.match(/<svg class="chart"/g)).toHaveLength(2 * names.length);
    expect(page.match(/<rect class="bar (?:wrong|exact|failed|lucky)"/g)).toHaveLength(
      2 * waysOf(facts).length,
    );
    for (const { race, title, ways } of facts.races) {
      expect(page).toContain(`<section id="${race}"`);
      expect(page).toContain(title);
      for (const { verdict, text } of ways)
        expect(page).toContain(`<span class="${verdict}">${marks[verdict]} ${text}`);
    }
    expect(page).toContain("tx.rows&lt;Account&gt;(&quot;account&quot;, [from, to]);");
  });

  test("nothing of the server is left", () => {
    expect(leftOf(temp)).toEqual([]);
    expect(processesOf(temp)).toEqual([]);
  });
});

test("the command that it ends with runs in a checkout that nobody has built", () => {
  const screen = readFileSync(join(root, "test/screens/demo.txt"), "utf8");
  const [, script = "", file = ""] = /npm run (\S+) (\S+)$/m.exec(screen) ?? [];
  const { scripts } = JSON.parse(readFileSync(join(root, "package.json"), "utf8"));
  expect(scripts[script]).toBe(scripts.start.replace(/demo$/, "race"));
  expect(readFileSync(join(root, file), "utf8")).toContain("invariant");
});

test("--json: one document, and nothing else", async () => {
  const { code, out, err } = await here("--only", "quota", "--json", "--processes", "2", "--callers", "4");
  expect(code, err).toBe(0);
  expect(out.trim().split("\n")).toHaveLength(1);
  const facts = JSON.parse(out) as Facts;
  expect(facts).toMatchObject({ exact: true, processes: 2, callers: 4 });
  expect(waysOf(facts).map(({ way }) => way)).toEqual([
    "naive",
    "SERIALIZABLE",
    "Holdfast lock",
    "Holdfast quota",
  ]);
  for (const way of facts.races[0]?.ways.slice(2) ?? [])
    expect(way).toMatchObject({ verdict: "exact", counted: 100, expected: 100, failed: {} });
});

test("Ctrl-C in the middle: the server and its files are gone", async () => {
  const shown = terminal(["demo", "--only", "transfers"], { env: { TMPDIR: temp } });
  await shown.until(/\d+\/\d+ calls/);
  expect(processesOf(temp)).not.toEqual([]);
  shown.type("\x03");
  expect(await shown.ended).toBe(130);
  const screen = await shown.screen();
  expect(screen.split("\n").at(-1)).toBe("Stopped.");
  expect(screen).not.toMatch(/[█░]/);
  expect(processesOf(temp)).toEqual([]);
  expect(leftOf(temp)).toEqual([]);
});

test("on a server of yours: SIGTERM in the middle drops what it made", async () => {
  const running = start(["demo", "--url", serverUrl("postgres"), "--only", "transfers", "--processes", "2"]);
  await eventually(() => running.out().includes("lockAccount"));
  expect(await demoDatabases()).toHaveLength(1);
  running.child.kill("SIGTERM");
  const { code, err } = await running.done;
  expect(code, err).toBe(130);
  expect(err.trim().split("\n").at(-1)).toBe("Stopped.");
  expect(await demoDatabases()).toEqual([]);
});

test("without a terminal: plain lines, and the truth when nobody is there to race with", async () => {
  const { code, out, err } = await here("--only", "last-item", "--processes", "1", "--callers", "1");
  expect(code, err).toBe(0);
  // oxlint-disable-next-line no-control-regex -- that there are none is the point.
  expect(out + err).not.toMatch(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f█░]/);
  expect(out).toContain("~ 20 sold of 20 (nobody to race with)");
  expect(out).toContain("Naive code: 0 of 1 wrong, 1 with nobody to race with. With Holdfast: 2 of 2 exact.");
  expect(out).toContain("docs/stock.md");
  expect(out).not.toContain("docs/queue.md");
  expect(await demoDatabases()).toEqual([]);
});

test("what cannot be run is said in one line, with exit code 2", async () => {
  const user = `demo_nobody_${process.pid}`;
  await admin.query(`CREATE ROLE ${user} LOGIN PASSWORD 'hush-hush' NOCREATEDB`);
  const poor = new URL(serverUrl("postgres"));
  poor.username = user;
  poor.password = "hush-hush";
  const wrong = new URL(poor);
  wrong.password = "not-that-one";
  writeFileSync(join(folder, "file"), "");
  const cases: Readonly<Record<string, readonly [readonly string[], RegExp]>> = {
    refused: [
      ["--url", nowhere],
      /^holdfast: Could not connect to postgres:\/\/nobody@127\.0\.0\.1:1\/none \(--url\): .*Nothing listens there/,
    ],
    "a right that is missing": [
      ["--url", poor.href],
      /may not create a database.*ALTER ROLE … CREATEDB.*leave --url out/,
    ],
    password: [["--url", wrong.href], /Check the user and the password/],
    "another kind of server": [["--url", "mysql://root@127.0.0.1:1/x"], /is MySQL; this works on PostgreSQL/],
    "too many connections": [
      ["--url", serverUrl("postgres"), "--processes", "1000"],
      /connections left, and the demo takes \d+: use fewer/,
    ],
    "a page that cannot be written": [
      ["--html", join(folder, "file/demo.html")],
      /^holdfast: Could not write .*\/file\/demo\.html: /,
    ],
  };
  try {
    const outcomes = await Promise.all(
      Object.entries(cases).map(
        async ([name, [args, said]]) => [name, said, await command(["demo", ...args])] as const,
      ),
    );
    for (const [name, said, { code, out, err }] of outcomes) {
      const lines = err
        .trim()
        .split("\n")
        .filter((line) => !/^(?:Connecting|Starting)/.test(line));
      expect({ name, code, out, lines: lines.length }).toEqual({ name, code: 2, out: "", lines: 1 });
      expect(lines[0], name).toMatch(said);
      expect(err).not.toMatch(/hush-hush|not-that-one/);
    }
  } finally {
    await admin.query(`DROP ROLE ${user}`);
  }
  const mistakes: readonly (readonly [string[], string])[] = [
    [["--only", "quotas"], "Allowed choices are quota, last-item, transfers, jobs, cron"],
    [["--callers", "0"], "It must be a whole number from 1 to 1000."],
  ];
  const answers: Outcome[] = await Promise.all(mistakes.map(([args]) => command(["demo", ...args])));
  for (const [i, { code, err }] of answers.entries()) {
    expect(code).toBe(2);
    expect(err).toContain(mistakes[i]?.[1]);
  }
});
