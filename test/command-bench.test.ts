/** `holdfast bench` on servers that hold somebody's data: it measures, and leaves all as it was. */
import { randomBytes } from "node:crypto";
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import mysql from "mysql2/promise";
import { Client, Pool } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type Outcome, type Running, command, start } from "./harness/command.ts";
import { type TestDatabase, createDatabase, serverUrl, unavailable } from "./harness/databases.ts";
import { terminal } from "./harness/terminal.ts";
import { eventually } from "./harness/wait.ts";

interface Told {
  readonly server: { readonly kind: string; readonly version: string; readonly address?: string };
  readonly roundTripMs: number;
  readonly place: { readonly what: string; readonly name: string };
  readonly connections: number;
  readonly seconds: number;
  readonly machine: { readonly cpus: number };
  readonly suites: readonly {
    readonly suite: string;
    readonly rows: readonly {
      readonly cell: string;
      readonly contestant: string;
      readonly opsPerSecond: number;
      readonly p50Ms: number | null;
      readonly p99Ms: number | null;
      readonly ratio: number;
    }[];
    readonly trials: readonly {
      readonly contestant: string;
      readonly own: boolean;
      readonly exact: boolean;
      readonly expected: number;
      readonly counted: number;
      readonly text: string;
    }[];
    readonly ratios: Readonly<Record<string, number>>;
    readonly meaning: string;
  }[];
  readonly leftOut: readonly { readonly suite: string; readonly why: string }[];
  readonly exact: boolean;
  readonly removed: readonly string[];
  readonly left: readonly string[];
}

const quick = ["--seconds", "0.05", "--connections", "4"] as const;
/** Until it is stopped. */
const long = ["--seconds", "60", "--connections", "4", "--yes"] as const;
const password = "open-sesame";

function told({ code, out, err }: Outcome): Told {
  expect(code, err).toBe(0);
  expect(out.split("\n"), "one document").toHaveLength(2);
  return JSON.parse(out) as Told;
}

/** One line that says why. */
function refusal({ code, out, err }: Outcome): string {
  expect(code, err).toBe(2);
  expect(out).toBe("");
  expect(err).toMatch(/^holdfast: .+\n$/);
  return err;
}

describe("on a PostgreSQL with data", () => {
  let database: TestDatabase;
  let admin: Client;
  const roles: string[] = [];

  beforeAll(async () => {
    database = await createDatabase("postgres");
    admin = new Client({ connectionString: database.url });
    await admin.connect();
    const pool = new Pool({ connectionString: database.url, max: 3 });
    const hf = holdfast(fromPg(pool));
    await hf.migrate();
    await quota(hf, { name: "units", limit: 100 }).consume("user-1", 7, { id: "request-1" });
    const shelf = stock(hf, { name: "bench" });
    await shelf.increase("sku-0001", 100);
    await queue<{ n: number }>(hf, "bench").enqueue({ n: 1 });
    // Of the names that the benchmarks use for theirs.
    await pool.query("CREATE TABLE image (user_id bigint, bytes bigint)");
    await pool.query("INSERT INTO image SELECT n, n FROM generate_series(1, 100) n");
    await pool.query("CREATE TABLE account (id bigint PRIMARY KEY, balance int)");
    await pool.query("INSERT INTO account SELECT n, 10 FROM generate_series(1, 50) n");
    await hf.close();
    await pool.end();
  });

  afterAll(async () => {
    // Whatever a test that failed has left.
    const found = (
      await admin?.query("SELECT datname FROM pg_database WHERE datname LIKE 'holdfast_bench_%'")
    )?.rows;
    for (const { datname } of found ?? [])
      await admin.query(`DROP DATABASE IF EXISTS ${datname} WITH (FORCE)`);
    for (const role of roles) await admin.query(`DROP OWNED BY ${role} CASCADE; DROP ROLE ${role}`);
    await admin?.end();
    await database?.drop();
  });

  /** All that there is, and what is in it. */
  async function everything(): Promise<unknown> {
    const { rows: catalog } = await admin.query(
      `SELECT 'relation' AS what, oid::text, relname::text AS name, relfilenode::text AS file FROM pg_class WHERE relnamespace NOT IN ('pg_catalog'::regnamespace, 'pg_toast'::regnamespace)
        UNION ALL SELECT 'schema', oid::text, nspname, nspacl::text FROM pg_namespace WHERE nspname !~ '^pg_(temp|toast_temp)_'
        UNION ALL SELECT 'function', oid::text, proname, md5(prosrc) FROM pg_proc WHERE oid >= 16384
        UNION ALL SELECT 'extension', oid::text, extname, '' FROM pg_extension
        ORDER BY 1, 2`,
    );
    const { rows: tables } = await admin.query<{ name: string }>(
      `SELECT oid::regclass::text AS name FROM pg_class WHERE relkind IN ('r', 'p', 'S') AND oid >= 16384
          AND relnamespace NOT IN ('pg_catalog'::regnamespace, 'pg_toast'::regnamespace, 'information_schema'::regnamespace) ORDER BY 1`,
    );
    const contents: Record<string, unknown> = {};
    for (const { name } of tables) {
      const { rows } = await admin.query(
        `SELECT count(*)::int AS rows, md5(coalesce(string_agg(ROW(t.*)::text, E'\\n' ORDER BY ROW(t.*)::text), '')) AS hash FROM ${name} t`,
      );
      contents[name] = rows[0];
    }
    return { catalog, contents };
  }

  async function places(): Promise<string[]> {
    const { rows } = await admin.query<{ name: string }>(
      `SELECT datname AS name FROM pg_database WHERE datname LIKE 'holdfast_bench_%'
        UNION ALL SELECT nspname FROM pg_namespace WHERE nspname LIKE 'holdfast_bench_%' ORDER BY 1`,
    );
    return rows.map(({ name }) => name);
  }

  /** Under way, in a database that this test has seen. */
  async function underWay(...args: string[]): Promise<{ readonly run: Running; readonly name: string }> {
    const before = new Set(await places());
    const run = start(["bench", ...args, "--url", database.url]);
    await eventually(() => {
      expect(run.err()).toContain("locks: 1,000 users …");
    });
    const [name] = (await places()).filter((each) => !before.has(each));
    if (name === undefined) throw new Error(`there is no database: ${run.err()}`);
    return { run, name };
  }

  async function role(rights: string): Promise<string> {
    const name = `bench_${randomBytes(6).toString("hex")}`;
    await admin.query(`CREATE ROLE ${name} LOGIN PASSWORD '${password}'`);
    roles.push(name);
    if (rights !== "") await admin.query(`GRANT ${rights} ON DATABASE ${database.name} TO ${name}`);
    const url = new URL(database.url);
    url.username = name;
    url.password = password;
    return url.href;
  }

  test("every suite runs in a database of its own, and nothing is changed or left", async () => {
    const before = await everything();
    const outcome = await command(["bench", ...quick, "--yes", "--json", "--url", database.url]);
    const result = told(outcome);
    expect(await everything()).toEqual(before);
    expect(await places()).toEqual([]);

    expect(outcome.err).toContain("with 4 connections, in a database of its own that is removed afterwards.");
    expect(outcome.err + outcome.out).not.toContain(new URL(database.url).password);
    expect(result).toMatchObject({
      server: { kind: "postgres", version: expect.stringMatching(/^PostgreSQL \d+/) },
      place: { what: "database", name: expect.stringMatching(/^holdfast_bench_[0-9a-f]{12}$/) },
      connections: 4,
      seconds: 0.05,
      leftOut: [],
      exact: true,
      removed: [],
      left: [],
    });
    expect(result.roundTripMs).toBeGreaterThan(0);
    expect(result.machine.cpus).toBeGreaterThan(0);
    const shape = result.suites.map(({ suite, rows, ratios }) => [
      suite,
      [...new Set(rows.map(({ contestant }) => contestant))],
      Object.keys(ratios),
    ]);
    expect(shape).toEqual([
      ["locks", ["naive", "by hand", "FOR UPDATE", "holdfast"], ["1,000 users", "one hot user"]],
      ["rows", ["naive", "by hand", "holdfast", "versioned"], ["1,000 rows", "one hot row"]],
      ["quota", ["naive", "by hand", "holdfast"], ["1,000 users", "one hot user"]],
      ["stock", ["naive", "by hand", "conditional UPDATE", "holdfast"], ["one hot SKU", "3 of 1,000 SKUs"]],
      ["queue", ["by hand", "holdfast", "naive"], ["enqueue", "drain"]],
    ]);
    for (const { suite, rows, trials, ratios, meaning } of result.suites) {
      for (const { cell, contestant, opsPerSecond, p50Ms, p99Ms, ratio } of rows) {
        const where = `${suite}, ${cell}, ${contestant}`;
        expect(opsPerSecond, where).toBeGreaterThan(0);
        expect(ratio, where).toBeGreaterThan(0);
        expect(typeof p50Ms, where).toBe(cell === "drain" ? "object" : "number");
        expect(typeof p99Ms, where).toBe(cell === "drain" ? "object" : "number");
        const base = rows.find((row) => row.cell === cell && row.contestant === "by hand");
        expect(ratio, where).toBeCloseTo(opsPerSecond / (base?.opsPerSecond ?? 0), 2);
        if (contestant === "holdfast") expect(ratios[cell]).toBe(ratio);
      }
      // All but the naive way are written correctly; that one may be lucky.
      for (const { contestant, exact, expected, counted, text } of trials) {
        expect(expected, suite).toBeGreaterThan(0);
        if (contestant !== "naive")
          expect({ contestant, exact, counted, text }, suite).toEqual({
            contestant,
            exact: true,
            counted: expected,
            text: "exact",
          });
      }
      expect(trials.filter(({ own }) => own).length, suite).toBe(suite === "rows" ? 2 : 1);
      expect(meaning).toContain("With Holdfast it is exact");
    }
    // Of five suites with callers that all want the last one, naive code leaks in some.
    const naive = result.suites.map(({ trials }) => trials.find(({ contestant }) => contestant === "naive"));
    expect(naive.filter((trial) => trial && trial.counted !== trial.expected)).not.toEqual([]);
  });

  test("a user without CREATEDB gets a schema, and is told what is left out; one without any right, why", async () => {
    const before = await everything();
    const url = await role("CREATE");
    const result = told(
      await command(["bench", "locks", "quota", "rows", ...quick, "--yes", "--json", "--url", url]),
    );
    expect(result.place.what).toBe("schema");
    expect(result.suites.map(({ suite }) => suite)).toEqual(["locks", "rows"]);
    expect(result.leftOut).toEqual([{ suite: "quota", why: expect.stringContaining("CREATEDB") }]);
    expect(await places()).toEqual([]);
    expect(refusal(await command(["bench", "quota", ...quick, "--yes", "--url", url]))).toContain("CREATEDB");
    const none = refusal(await command(["bench", ...quick, "--yes", "--url", await role("")]));
    expect(none).toContain("neither a database nor a schema");
    expect(none).not.toContain(password);
    // The rights that were just given are all that is new.
    await admin.query(`DROP OWNED BY ${roles.join(", ")}`);
    expect(await everything()).toEqual(before);
  });

  test("another run that is under way is left alone; Ctrl-C leaves nothing", async () => {
    const { run, name } = await underWay("locks", ...long);
    const { removed } = told(
      await command(["bench", "rows", ...quick, "--yes", "--json", "--url", database.url]),
    );
    expect(removed).toEqual([]);
    expect(await places()).toEqual([name]);
    run.child.kill("SIGINT");
    const { code, err } = await run.done;
    expect(code, err).toBe(130);
    expect(err).toContain("Stopped; what was made for it is removed.");
    expect(await places()).toEqual([]);
  });

  test("what a killed run has left is named, and the next one asks whether to remove it", async () => {
    const unused = (name: string): Promise<void> =>
      // Its sessions notice that nobody is there when they next have something to say.
      eventually(async () => {
        const { rows } = await admin.query("SELECT 1 FROM pg_stat_activity WHERE datname = $1", [name]);
        expect(rows).toEqual([]);
      });
    const hurried = await underWay("locks", ...long);
    // The second time, at once.
    hurried.run.child.kill("SIGINT");
    hurried.run.child.kill("SIGTERM");
    const { code, err } = await hurried.run.done;
    expect(code).toBe(130);
    expect(err).toContain(`DROP DATABASE ${hurried.name}`);
    expect(await places()).toEqual([hurried.name]);
    await unused(hurried.name);

    const killed = await underWay("locks", ...long);
    expect(killed.run.err()).toContain(`Removed ${hurried.name}`);
    killed.run.child.kill("SIGKILL");
    await killed.run.done;
    await unused(killed.name);
    expect(await places()).toEqual([killed.name]);

    const screen = terminal(["bench", "locks", "--seconds", "60", "--url", database.url], { columns: 300 });
    await screen.until(/removed afterwards\? \(y\/N\)/);
    screen.type("y\r");
    const asked = await screen.until(/Remove it\? \(y\/N\)/);
    expect(asked).toContain(killed.name);
    expect(await places()).toContain(killed.name);
    screen.type("y\r");
    await screen.until(/locks {2}[█░]+ {2}1,000 users/);
    expect(await places()).not.toContain(killed.name);
    screen.type("\x03");
    expect(await screen.ended).toBe(130);
    expect(await places()).toEqual([]);
  });

  test("a mistake is one line", async () => {
    expect(refusal(await command(["bench", "lokcs"]))).toBe(
      'holdfast: There is no suite "lokcs". There are locks, rows, quota, stock, queue.\n',
    );
    // Nobody there to be asked.
    expect(refusal(await command(["bench", "locks", "--url", database.url]))).toContain("add --yes");
    const crowded = refusal(await command(["bench", "--connections", "200", "--yes", "--url", database.url]));
    expect(crowded).toMatch(/use --connections \d+\.$/m);
    expect(refusal(await command(["bench", "--url", "file:app.db"]))).toMatch(/SQLite.*docs\/benchmarks\.md/);
    expect(await places()).toEqual([]);
    const { code, out } = await command(["bench", "--list"]);
    expect(code).toBe(0);
    for (const name of ["locks", "rows", "quota", "stock", "queue"])
      expect(out).toMatch(new RegExp(`^${name}: `, "m"));
  });
});

describe("on MariaDB", () => {
  const reason = unavailable("mariadb");
  beforeEach(({ skip }) => skip(reason !== undefined, reason));

  test("a user who may not create a database is told so, and nothing of one that was never made", async () => {
    const server = await mysql.createConnection(serverUrl("mariadb"));
    const name = `bench_${randomBytes(6).toString("hex")}`;
    try {
      await server.query(`CREATE USER ${name} IDENTIFIED BY '${password}'`);
      const url = new URL(serverUrl("mariadb"));
      url.username = name;
      url.password = password;
      url.pathname = "/";
      const { code, err } = await command(["bench", "locks", ...quick, "--yes", "--url", url.href]);
      expect(code).toBe(2);
      expect(err).toMatch(/^holdfast: .* may not create a database/m);
      expect(err).not.toMatch(/could not be removed|holdfast_bench_[0-9a-f]/);
    } finally {
      await server.query(`DROP USER IF EXISTS ${name}`);
      await server.end();
    }
  });

  test("the locks run in a database of their own, which is gone afterwards; a killed run's is removed", async () => {
    const server = await mysql.createConnection(serverUrl("mariadb"));
    try {
      const databases = async (): Promise<string[]> =>
        ((await server.query("SHOW DATABASES LIKE 'holdfast\\_bench\\_%'"))[0] as object[]).map(
          (row) => Object.values(row)[0] as string,
        );
      const run = start(["bench", "locks", ...long, "--url", serverUrl("mariadb")]);
      await eventually(() => {
        expect(run.err()).toContain("locks: 1,000 users …");
      });
      const live = await databases();
      expect(live).toHaveLength(1);
      const beside = told(
        await command(["bench", "locks", ...quick, "--yes", "--json", "--url", serverUrl("mariadb")]),
      );
      expect(beside).toMatchObject({
        server: { kind: "mariadb" },
        removed: [],
        exact: true,
        leftOut: [],
      });
      expect(beside.suites.map(({ suite }) => suite)).toEqual(["locks"]);
      expect(await databases()).toEqual(live);
      run.child.kill("SIGKILL");
      await run.done;
      const [name] = live;
      await eventually(async () => {
        const [[row]] = (await server.query("SELECT IS_FREE_LOCK(?) AS free", [name])) as unknown as [
          [{ free: number }],
        ];
        expect(row.free).toBe(1);
      });

      // Stopped as soon as it has begun to measure.
      const after = start(["bench", "locks", ...long, "--url", serverUrl("mariadb")]);
      await eventually(() => {
        expect(after.err()).toContain("locks: 1,000 users …");
      });
      expect(after.err()).toContain(`Removed ${name}`);
      expect(await databases()).not.toContain(name);
      after.child.kill("SIGINT");
      expect((await after.done).code).toBe(130);
      expect(await databases()).toEqual([]);
    } finally {
      await server.end();
    }
  });
});

const all = ["locks", "rows", "quota", "stock", "queue"];

// MySQL is asked for what differs from MariaDB.
describe.each([
  ["mariadb", all],
  ["mysql", process.env["HOLDFAST_LONG"] === "1" ? all : ["queue"]],
] as const)("suites on %s", (server, names) => {
  const reason = unavailable(server);
  beforeEach(({ skip }) => skip(reason !== undefined, reason));

  test("what is written correctly is exact; and nothing is left", { timeout: 180_000 }, async () => {
    const outcome = await command([
      "bench",
      ...names,
      ...quick,
      "--yes",
      "--json",
      "--url",
      serverUrl(server),
    ]);
    const result = told(outcome);
    expect(result).toMatchObject({ server: { kind: server }, leftOut: [], exact: true, left: [] });
    expect(result.suites.map(({ suite }) => suite)).toEqual(names);
    for (const { suite, rows, trials } of result.suites) {
      for (const { cell, contestant, opsPerSecond } of rows)
        expect(opsPerSecond, `${suite}, ${cell}, ${contestant}`).toBeGreaterThan(0);
      for (const { contestant, exact, text } of trials)
        if (contestant !== "naive")
          expect([suite, contestant, exact, text]).toEqual([suite, contestant, true, "exact"]);
    }
    const naive = result.suites.map(({ trials }) => trials.find(({ contestant }) => contestant === "naive"));
    expect(naive.filter((trial) => trial && trial.counted !== trial.expected)).not.toEqual([]);
  });
});
