/** `holdfast certify`: what it says of servers that are true, and of one that lies; and what it leaves behind: nothing. */
import { readFileSync } from "node:fs";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { type Holdfast, holdfast, key, sql } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Client, Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type Certificate, certify } from "../packages/cli/src/certify/certify.ts";
import { htmlReport } from "../packages/cli/src/certify/html.ts";
import { probes } from "../packages/cli/src/certify/probes.ts";
import { exitCodeOf } from "../packages/cli/src/certify/run.ts";
import { connect } from "../packages/cli/src/server.ts";
import { command, root, start } from "./harness/command.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { type LyingProxy, lies, startLyingProxy } from "./harness/lying-proxy.ts";
import { terminal } from "./harness/terminal.ts";
import { eventually } from "./harness/wait.ts";

async function certified(url: string, only?: readonly string[]): Promise<Certificate> {
  await using server = await connect({ url });
  return await certify(server, { only, signal: new AbortController().signal, say: () => {} });
}

const having = ({ lines }: Certificate, verdict: string): string[] =>
  lines.filter((line) => line.verdict === verdict).map(({ id }) => id);

const shown = ({ lines }: Certificate): string =>
  lines.map(({ id, verdict, seen }) => `${verdict} ${id}: ${seen}`).join("\n");

const everything = probes.map(({ id }) => id);

/** What is not there on a true server, by what stands before it or by its kind. */
const gaps = {
  postgres: [],
  postgresOld: [],
  pgbouncer: ["session-stays", "session-lock", "notify"],
  mariadb: ["shared-locks", "commit-outcome", "notify"],
  mysql: ["shared-locks", "commit-outcome", "notify"],
} as const;

describe.for(Object.keys(gaps) as (keyof typeof gaps)[])("%s", (name) => {
  test("passes, but for what is not there", { timeout: 120_000 }, async ({ skip }) => {
    const reason = unavailable(name);
    skip(reason !== undefined, reason);
    const database = await createDatabase(name);
    try {
      const found = await certified(database.url);
      const absent = gaps[name] as readonly string[];
      expect(having(found, "absent"), shown(found)).toEqual(everything.filter((id) => absent.includes(id)));
      expect(having(found, "holds"), shown(found)).toEqual(everything.filter((id) => !absent.includes(id)));
      expect(exitCodeOf(found)).toBe(0);
    } finally {
      await database.drop();
    }
  });
});

describe("SQLite", () => {
  test.for(["wal", "delete"])("journal_mode %s passes", { timeout: 60_000 }, async (mode) => {
    const folder = await mkdtemp(join(tmpdir(), "holdfast-certify-"));
    try {
      const file = join(folder, "app.db");
      const db = new DatabaseSync(file);
      db.exec(`PRAGMA journal_mode = ${mode}; CREATE TABLE mine (id integer)`);
      const found = await certified(`file:${file}`);
      expect([...having(found, "fails"), ...having(found, "unknown")], shown(found)).toEqual([]);
      expect(having(found, "holds")).toEqual(
        expect.arrayContaining(["lock-excludes", "lock-then-read", "serializable", "history-counter"]),
      );
      expect(exitCodeOf(found)).toBe(0);
      expect(db.prepare("SELECT name FROM sqlite_schema").all()).toEqual([{ name: "mine" }]);
      db.close();
    } finally {
      await rm(folder, { recursive: true });
    }
  });
});

const noPostgres = unavailable("postgres");

describe("a proxy", () => {
  let database: TestDatabase;
  let proxy: LyingProxy;

  beforeAll(async () => {
    if (noPostgres !== undefined) return;
    database = await createDatabase("postgres");
    proxy = await startLyingProxy(database.url);
  });
  afterAll(async () => {
    await proxy?.close();
    await database?.drop();
  });

  // What is caught below is a lie, and no fault of the proxy's own.
  test("that tells the truth passes", { timeout: 120_000 }, async ({ skip }) => {
    skip(noPostgres !== undefined, noPostgres);
    proxy.lie = undefined;
    const found = await certified(proxy.url);
    expect(having(found, "holds"), shown(found)).toEqual(everything);
    expect(exitCodeOf(found)).toBe(0);
  });

  test.for(lies)("by which $name", { timeout: 120_000 }, async (lie, { skip }) => {
    skip(noPostgres !== undefined, noPostgres);
    proxy.lie = lie;
    const { caught, verdict = "fails" } = lie;
    const found = await certified(proxy.url, caught);
    expect(having(found, verdict), shown(found)).toEqual(everything.filter((id) => caught.includes(id)));
    expect(exitCodeOf(found)).toBe(verdict === "fails" ? 1 : 0);
  });

  test(
    "by which sessions are swapped between transactions passes otherwise",
    { timeout: 120_000 },
    async ({ skip }) => {
      skip(noPostgres !== undefined, noPostgres);
      const lie = lies.find(({ name }) => name === "sessions are swapped between transactions");
      proxy.lie = lie;
      const found = await certified(proxy.url);
      expect(having(found, "holds"), shown(found)).toEqual(
        everything.filter((id) => !lie?.caught.includes(id)),
      );
    },
  );

  test(
    "by which advisory locks are taken by nobody: locks are rows, and these hold",
    { timeout: 120_000 },
    async ({ skip }) => {
      skip(noPostgres !== undefined, noPostgres);
      proxy.lie = lies.find(({ name }) => name === "advisory locks are taken by nobody");
      const found = await certified(proxy.url, [
        "lock-excludes",
        "waits-end",
        "lock-then-read",
        "history-counter",
      ]);
      expect(found.capabilities?.transactionLocks).toBe("lock row");
      expect(having(found, "holds").length, shown(found)).toBe(4);
    },
  );

  test("that says it is a standby, and takes no tables: it is refused, and what needs none is tried", async ({
    skip,
  }) => {
    skip(noPostgres !== undefined, noPostgres);
    proxy.lie = {
      name: "a standby",
      like: "",
      caught: [],
      rewrite: (text) =>
        text.startsWith("CREATE TABLE")
          ? "CREATE TABLE"
          : text.replaceAll("pg_catalog.pg_is_in_recovery()", "true"),
    };
    const found = await certified(proxy.url);
    expect(found.refused).toMatch(/replica|standby/i);
    expect(having(found, "holds"), shown(found)).toEqual(expect.arrayContaining(["session-lock", "clock"]));
    expect(having(found, "unknown")).toContain("lock-excludes");
    expect(exitCodeOf(found)).toBe(1);
  });

  describe("and an instance", () => {
    const told = (name: string): void => {
      const lie = lies.find((each) => each.name === name);
      if (!lie) throw new Error(`There is no lie "${name}"`);
      proxy.lie = lie;
    };
    async function through<T>(work: (hf: Holdfast<PoolClient>) => Promise<T>): Promise<T> {
      const pool = new Pool({ connectionString: proxy.url, max: 3 });
      pool.on("error", () => {});
      const hf = holdfast(fromPg(pool));
      try {
        return await work(hf);
      } finally {
        await hf.close();
        await pool.end();
      }
    }

    test("that is told the truth believes in locks", async ({ skip }) => {
      skip(noPostgres !== undefined, noPostgres);
      proxy.lie = undefined;
      const found = await through(async (hf) => {
        const capabilities = await hf.capabilities();
        await hf.transaction({ lock: key("a"), isolation: "serializable" }, (tx) => tx.query(sql`SELECT 1`));
        return capabilities;
      });
      expect([found.transactionLocks, found.sessionLocks]).toEqual([
        "transaction advisory",
        "session advisory",
      ]);
    });

    test.for([
      ["advisory locks are of one node", /two sessions had the same advisory lock at once/],
      ["READ COMMITTED is a snapshot", /did not see what another one had committed/],
    ] as const)("by which %s refuses to lock, once it has looked", async ([name, why], { skip }) => {
      skip(noPostgres !== undefined, noPostgres);
      told(name);
      await through(async (hf) => {
        const { transactionLocks, joinedLocks, sessionLocks } = await hf.capabilities();
        for (const support of [transactionLocks, joinedLocks, sessionLocks])
          expect(support).toMatchObject({ supported: false, why: expect.stringMatching(why) });
        const error = await hf.transaction({ lock: key("a") }, async () => {}).catch((e: unknown) => e);
        expect(error).toMatchObject({ code: "HF_UNSUPPORTED", message: expect.stringMatching(why) });
        await expect(hf.hold(key("a"))).rejects.toMatchObject({ code: "HF_UNSUPPORTED" });
      });
    });

    test("by which every transaction is READ COMMITTED: another one is refused, and not run", async ({
      skip,
    }) => {
      skip(noPostgres !== undefined, noPostgres);
      told("every transaction is READ COMMITTED");
      await through(async (hf) => {
        for (const isolation of ["serializable", "repeatable read"] as const) {
          let ran = false;
          const run = hf.transaction({ isolation }, async () => void (ran = true));
          const error = await run.catch((e: unknown) => e);
          expect(error, isolation).toMatchObject({
            code: "HF_ISOLATION",
            message: expect.stringContaining(
              `begun as ${isolation}, and the server says that it is read committed`,
            ),
          });
          expect(ran).toBe(false);
        }
        // What was asked for is what is had here.
        await hf.transaction({ lock: key("a") }, (tx) => tx.query(sql`SELECT 1`));
        await hf.transaction({ readOnly: true }, (tx) => tx.query(sql`SELECT 1`));
      });
    });
  });

  test("leaves nothing behind, whatever it does", async ({ skip }) => {
    skip(noPostgres !== undefined, noPostgres);
    expect(await leftIn(database.url)).toEqual([]);
  });
});

/** Tables, schemas and functions of runs. */
async function leftIn(url: string): Promise<string[]> {
  const client = new Client({ connectionString: url });
  await client.connect();
  try {
    const { rows } = await client.query<{ name: string }>(
      `SELECT relname AS name FROM pg_class WHERE relname LIKE 'holdfast_certify%' AND relkind = 'r'
       UNION ALL SELECT nspname FROM pg_namespace WHERE nspname LIKE 'holdfast_certify%'
       UNION ALL SELECT proname FROM pg_proc WHERE proname LIKE 'holdfast_certify%'`,
    );
    return rows.map(({ name }) => name);
  } finally {
    await client.end();
  }
}

test("docs/certify.md has every probe, and every lie with the lines that catch it", () => {
  const docs = readFileSync(join(root, "docs/certify.md"), "utf8");
  const cells = docs
    .split("\n")
    .filter((line) => line.startsWith("| "))
    .map((line) => line.split("|").map((cell) => cell.trim()));
  const listed = cells.map(([, first]) => first?.replaceAll("`", ""));
  expect(probes.map(({ id }) => id).filter((id) => !listed.includes(id))).toEqual([]);
  for (const { name, like, caught } of lies) {
    const row = cells.find(([, first]) => first === name);
    expect(row?.slice(2, 4), name).toEqual([like, caught.map((id) => `\`${id}\``).join(", ")]);
  }
});

describe("the command", () => {
  let database: TestDatabase;
  let folder: string;

  beforeAll(async () => {
    folder = await mkdtemp(join(tmpdir(), "holdfast-certify-"));
    if (noPostgres === undefined) database = await createDatabase("postgres");
  });
  afterAll(async () => {
    await database?.drop();
    await rm(folder, { recursive: true });
  });

  test("tells as JSON, and writes a page that loads nothing", { timeout: 60_000 }, async ({ skip }) => {
    skip(noPostgres !== undefined, noPostgres);
    const page = join(folder, "deep", "certificate.html");
    const { code, out, err } = await command(["certify", database.url, "--json", "--html", page]);
    expect(code, err).toBe(0);
    const told = JSON.parse(out) as {
      kind: string;
      locks: string;
      probes: { id: string; verdict: string }[];
    };
    expect([told.kind, told.locks]).toEqual(["postgres", "transaction advisory"]);
    expect(told.probes.map(({ id }) => id)).toEqual(everything);
    expect(new Set(told.probes.map(({ verdict }) => verdict))).toEqual(new Set(["holds"]));
    expect(out + err).not.toContain(new URL(database.url).password);
    expect(err).toMatch(/^Makes the table holdfast_certify_\w+ .* and removes it afterwards\.$/m);
    const html = await readFile(page, "utf8");
    for (const id of everything) expect(html).toContain(`<code>${id}</code>`);
    expect(html).not.toMatch(/<script|<link|<img|https?:|url\(/);
    expect(html).toContain("default-src 'none'");
    expect(await leftIn(database.url)).toEqual([]);
  });

  test("nothing that a server says is markup in the page", () => {
    const [probe] = probes;
    if (!probe) throw new Error("There are no probes");
    const evil = `<img src=x onerror=alert(1)>"'&\u0000`;
    const html = htmlReport({
      server: evil,
      kind: "mysql",
      version: evil,
      capabilities: undefined,
      refused: evil,
      lines: [
        { ...probe, verdict: "fails", seen: `${evil}\n${evil}`, tried: evil, features: evil, advice: evil },
      ],
      nodes: [{ node: 2, server: evil, version: evil, what: evil, refused: evil }],
      alone: evil,
    });
    for (const part of ["<img", "\u0000"]) expect(html).not.toContain(part);
    expect(html.match(/&lt;img/g)?.length).toBeGreaterThan(10);
  });

  test.for([100, 60])("fits a terminal of %i columns", { timeout: 60_000 }, async (columns, { skip }) => {
    skip(noPostgres !== undefined, noPostgres);
    const screen = terminal(["certify", database.url, "--only", "lock-excludes", "session-lock", "clock"], {
      columns,
      rows: 50,
    });
    expect(await screen.ended).toBe(0);
    const text = await screen.all();
    expect(text).toMatch(/✓ lock-excludes: Two transactions/);
    expect(text).toMatch(/^ {2}tried A opens a transaction/m);
    expect(text).toMatch(/^ {2}seen {2}B was refused/m);
    expect(text).toMatch(/^ {2}for {3}hf\.transaction/m);
    expect(text).toMatch(/3 probes: 3 hold/);
    // Lines that were broken by the screen, and not by us, begin in the first column.
    for (const line of text.split("\n").filter((each) => each !== ""))
      expect(line).toMatch(/^(?: {2}|✓|Makes|PostgreSQL|Holdfast|Holds|3 probes|\S+)/);
  });

  test("Ctrl-C: it is over, and nothing is left", { timeout: 60_000 }, async ({ skip }) => {
    skip(noPostgres !== undefined, noPostgres);
    const run = start(["certify", database.url]);
    // In the middle of it: its table is there.
    await eventually(async () => (await leftIn(database.url)).length > 0);
    run.child.kill("SIGINT");
    const { code, err } = await run.done;
    expect(code, err).toBe(130);
    expect(await leftIn(database.url)).toEqual([]);
  });

  test("--read-only makes nothing, and says what it has not tried", { timeout: 60_000 }, async ({ skip }) => {
    skip(noPostgres !== undefined, noPostgres);
    const { code, out, err } = await command(["certify", database.url, "--read-only", "--json"], {
      env: { PGOPTIONS: "-c default_transaction_read_only=on" },
    });
    expect([code, err]).toEqual([0, ""]);
    const told = (JSON.parse(out) as { probes: { id: string; verdict: string; seen: string }[] }).probes;
    const of = (verdict: string) => told.filter((each) => each.verdict === verdict).map(({ id }) => id);
    expect(of("holds")).toEqual(["shared-locks", "session-stays", "session-lock", "clock", "notify"]);
    expect(of("unknown").length).toBe(everything.length - 5);
    expect(told.find(({ id }) => id === "row-lock")?.seen).toBe("not tried: it needs a table");
  });

  test(
    "a user who may make no table is told so; one who may make a schema needs no more",
    { timeout: 60_000 },
    async ({ skip }) => {
      skip(noPostgres !== undefined, noPostgres);
      const admin = new Client({ connectionString: database.url });
      await admin.connect();
      const role = `certify_${database.name}`;
      const url = new URL(database.url);
      [url.username, url.password] = [role, "secret"];
      try {
        await admin.query(
          `CREATE ROLE ${role} LOGIN PASSWORD 'secret'; REVOKE CREATE ON SCHEMA public FROM public`,
        );
        const refused = await command(["certify", url.href, "--only", "committed"]);
        expect(refused.code).toBe(2);
        expect(refused.err).toMatch(/could not be made: permission denied.*--read-only/);
        await admin.query(`GRANT CREATE ON DATABASE ${database.name} TO ${role}`);
        const own = await command(["certify", url.href, "--only", "committed", "procedures"]);
        expect([own.code, own.out.includes("2 probes: 2 hold")], own.err).toEqual([0, true]);
        // What could not be tried is not well.
        await admin.query("REVOKE USAGE ON LANGUAGE plpgsql FROM public");
        const blind = await command(["certify", url.href, "--only", "committed", "procedures", "--json"]);
        expect(blind.code, blind.err).toBe(2);
        const told = JSON.parse(blind.out) as { probes: { verdict: string }[]; error: { exitCode: number } };
        expect(told.probes.map(({ verdict }) => verdict)).toEqual(["holds", "unknown"]);
        expect(told.error.exitCode).toBe(2);
        expect(await leftIn(database.url)).toEqual([]);
      } finally {
        await admin.query(`DROP OWNED BY ${role}; DROP ROLE ${role}`);
        await admin.end();
      }
    },
  );

  test("what was typed wrong: one line", async () => {
    const strange = await command(["certify", "postgres://127.0.0.1:1/x", "--only", "nonsense"]);
    expect([strange.code, strange.out]).toEqual([2, ""]);
    expect(strange.err).toContain('There is no probe "nonsense"');
    const twice = await command(["certify", "file:a.db", "--url", "file:b.db"]);
    expect([twice.code, twice.err]).toEqual([2, "holdfast: The database is named twice: leave --url out.\n"]);
    const listed = await command(["certify", "--list"]);
    for (const id of everything) expect(listed.out).toContain(`${id}: `);
  });
});
