/** `holdfast locks`, `top`, `kill` and `keys`, of locks that other processes have. */
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { setTimeout as sleep } from "node:timers/promises";
import { type Holdfast, StaleFenceError, fenced, holdfast, key, sql } from "holdfast";
import { trail } from "holdfast/audit";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { createConnection, createPool } from "mysql2/promise";
import { Client, Pool } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, inject, test } from "vitest";
import { command, start } from "./harness/command.ts";
import { type TestDatabase, createDatabase, serverUrl, unavailable } from "./harness/databases.ts";
import { type Worker, startWorker } from "./harness/processes.ts";
import { startProxy } from "./harness/proxy.ts";
import { random } from "./harness/random.ts";
import { type Terminal, terminal } from "./harness/terminal.ts";
import { eventually } from "./harness/wait.ts";
import type { LockedArg } from "./workers/locked.ts";

const file = new URL("./workers/locked.ts", import.meta.url);
const locked = (url: string, ...keys: LockedArg["keys"]): Worker<string> =>
  startWorker<string>(file, { url, keys } satisfies LockedArg);

interface Seen {
  readonly name: string;
  readonly granted: boolean;
  readonly session: { readonly id: string; readonly application: string; readonly state: string };
  readonly blockedBy: readonly string[];
}

interface Killed {
  readonly session: string;
  readonly done: string;
  readonly through: readonly string[];
  readonly stillWaiting: readonly string[];
  readonly again: readonly unknown[];
}

/** What a terminal would take for an order. Lines are ended by the command itself. */
// oxlint-disable-next-line no-control-regex -- it is what must not be there.
const raw = /[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]/;

/** With the screen as it is, if it never comes. */
async function see(screen: Terminal, what: string | RegExp): Promise<string> {
  const late = new AbortController();
  const never = sleep(30_000, undefined, { signal: late.signal }).then(async () => {
    throw new Error(`${String(what)} is not on the screen:\n${await screen.screen()}`);
  });
  never.catch(() => {});
  return Promise.race([screen.until(what), never]).finally(() => late.abort());
}

/** Named locks of other databases are told on MySQL too. */
async function waitsFor(hf: Holdfast<unknown>, count = 1, name = ""): Promise<void> {
  await eventually(
    async () => {
      const { waiters } = await hf.inspect();
      return waiters.filter((each) => each.name.startsWith(name)).length >= count;
    },
    { interval: 150 },
  );
}

/** The session that has this key. */
async function holderOf(hf: Holdfast<unknown>, name: string): Promise<string> {
  const found = await eventually(
    async () => (await hf.inspect()).holders.find((each) => each.name.startsWith(name))?.session.id ?? false,
    { interval: 150 },
  );
  return String(found);
}

async function killHolder(hf: Holdfast<unknown>, name: string, url: string) {
  return command(["kill", await holderOf(hf, name), "--yes", "--json", "--url", url]);
}

/** A transaction that waits for its end from outside; its second run, for `end`. Resolves to the number of runs, or to its error. */
function retried(hf: Holdfast<unknown>, name: string, retry: { on?: readonly "killed"[] } = {}) {
  let runs = 0;
  const { promise: ended, resolve: end } = Promise.withResolvers<void>();
  const done = hf.transaction({ lock: key(name), deadline: 120_000, retry }, async ({ signal }) => {
    if (++runs > 1) return ended.then(() => runs);
    return new Promise<number>((_, reject) =>
      signal.addEventListener("abort", () => reject(signal.reason as Error), { once: true }),
    );
  });
  return { done: done.catch((error: unknown) => error), runs: () => runs, end };
}

describe.each(["postgres", "mysql", "mariadb"] as const)("on %s", (server) => {
  const reason = unavailable(server);
  let database: TestDatabase;
  let hf: Holdfast<unknown>;
  let close: () => Promise<void>;
  beforeEach(({ skip }) => skip(reason !== undefined, reason));
  beforeAll(async () => {
    if (reason !== undefined) return;
    database = await createDatabase(server);
    if (server === "postgres") {
      const pool = new Pool({ connectionString: database.url, max: 3 });
      hf = holdfast(fromPg(pool));
      close = () => pool.end();
    } else {
      const pool = createPool({ uri: database.url, connectionLimit: 3 });
      hf = holdfast(fromMysql2(pool));
      close = () => pool.end();
    }
    await hf.migrate();
  });
  afterAll(async () => {
    await hf?.close();
    await close?.();
    await database?.drop();
  });

  test("locks names key, holder and waiter; kill lets the waiter go on", async () => {
    const holder = locked(database.url, ["image-upload", "42"], ["audit", "9"]);
    await holder.message("holding");
    const waiter = locked(database.url, ["image-upload", "42"]);
    try {
      await waitsFor(hf, 1, "image-upload:42");
      // A session lock besides, with a name too.
      const held = await hf.hold(key("nightly"));
      const [told, text] = await Promise.all([
        command(["locks", "--json", "--url", database.url]),
        command(["locks", "--url", database.url]),
      ]);
      await held.release();
      expect(told, told.err).toMatchObject({ code: 0, err: "" });
      const { holders, waiters } = JSON.parse(told.out) as { holders: Seen[]; waiters: Seen[] };
      const named = (entries: Seen[], name: string) => entries.find((entry) => entry.name.startsWith(name));
      const waits = named(waiters, "image-upload:42");
      const has = named(holders, "image-upload:42");
      expect(has?.session.id).toMatch(/^\d+$/);
      expect(waits?.blockedBy).toEqual([has?.session.id]);
      expect(waits?.session.id).not.toBe(has?.session.id);
      expect(named(holders, "nightly")).toBeDefined();
      // It has two locks, of which its label names one: no lock may have the other's name.
      const second = holders.filter(
        ({ session, name }) => session.id === has?.session.id && !name.startsWith("image-upload:42"),
      );
      expect(second).toHaveLength(1);
      if (server !== "postgres") expect(second[0]?.name).toBe("audit:9");

      expect(text.code, text.err).toBe(0);
      const tree = text.out.split("\n");
      const at = tree.findIndex(
        (line) => line.startsWith(has?.session.id as string) && /holds .*image-upload:42/.test(line),
      );
      expect(tree[at + 1], text.out).toMatch(
        new RegExp(`^└─ ${waits?.session.id} .*waits for image-upload:42  \\S`),
      );

      const unasked = await command(["kill", has?.session.id as string, "--url", database.url]);
      expect(unasked).toMatchObject({ code: 2, out: "" });
      expect(unasked.err).toContain(`${waits?.session.id} `);
      expect(unasked.err).toContain("--yes");

      const kill = await command([
        "kill",
        has?.session.id as string,
        "--yes",
        "--json",
        "--note",
        "ticket 7",
        "--url",
        database.url,
      ]);
      expect(kill.code, kill.err).toBe(0);
      const killed = {
        session: has?.session.id,
        done: "terminated",
        through: [waits?.session.id],
        stillWaiting: [],
        again: [],
      };
      expect((JSON.parse(kill.out) as { sessions: Killed[] }).sessions).toEqual([killed]);
      // Who did it, to whom, and what became of it.
      const user = server === "postgres" ? "postgres" : "holdfast";
      expect(await trail(hf, { target: `session:${has?.session.id}` })).toMatchObject([
        {
          action: "kill",
          outcome: "done",
          actor: expect.stringMatching(new RegExp(`^.+@.+ as ${user}`)),
          details: {
            user,
            ...(server === "postgres" && { application: "shop", client: "127.0.0.1" }),
            holds: expect.arrayContaining(["image-upload:42"]),
            waiting: 1,
            note: "ticket 7",
          },
          result: killed,
        },
      ]);
      await waiter.message("holding");
      waiter.send("go on");
      expect(await waiter.result).toBe("committed");
      holder.send("go on");
      expect(await holder.result).not.toBe("committed");
    } finally {
      holder.sigkill();
      waiter.sigkill();
    }
    await eventually(async () => {
      const [empty, blocked] = await Promise.all([
        command(["locks", "--url", database.url]),
        command(["locks", "--blocked", "--url", database.url]),
      ]);
      expect(empty.out).toMatch(/^Nobody holds a lock or a lease in /);
      expect(blocked.out).toMatch(/^Nobody waits for a lock in /);
    });
  });

  test("nor does one whose body is at something else until the note is gone", async () => {
    let runs = 0;
    const { promise: over, resolve: end } = Promise.withResolvers<void>();
    const done = hf
      .transaction({ lock: key("idle"), deadline: 120_000 }, async (tx) => {
        if (++runs === 1) await over;
        return tx.query(sql`SELECT 1 AS one`);
      })
      .catch((error: unknown) => error);
    const at = ["--yes", "--watch", "0", "--url", database.url];
    const { code, out, err } = await command(["kill", await holderOf(hf, "idle"), ...at]);
    expect(code, err).toBe(0);
    expect(out).toContain("If its client has not noticed yet");
    end();
    expect(await done).toMatchObject({ code: "HF_KILLED", retryable: false });
    expect(runs).toBe(1);
  });

  test("a transaction that is killed does not run again, unless it is to; one that was cut by others does", async () => {
    const stopped = retried(hf, "stopped");
    const { code, out, err } = await killHolder(hf, "stopped", database.url);
    expect(code, err).toBe(0);
    expect(JSON.parse(out)).toMatchObject({ sessions: [{ done: "terminated", again: [] }] });
    expect(await stopped.done).toMatchObject({ code: "HF_KILLED", retryable: false });
    expect(stopped.runs()).toBe(1);

    const stubborn = retried(hf, "stubborn", { on: ["killed"] });
    const again = await killHolder(hf, "stubborn", database.url);
    expect(JSON.parse(again.out), again.err).toMatchObject({
      sessions: [{ done: "terminated", again: [{ lock: "stubborn", holds: true }] }],
    });
    stubborn.end();
    expect(await stubborn.done).toBe(2);

    // As a restart, or a failover, would.
    const cut = retried(hf, "cut");
    const id = await holderOf(hf, "cut");
    await hf.transaction((tx) =>
      tx.query(sql.raw(server === "postgres" ? `SELECT pg_terminate_backend(${id})` : `KILL ${id}`)),
    );
    await eventually(() => cut.runs() === 2);
    cut.end();
    expect(await cut.done).toBe(2);
  });

  test("a lease is listed, shown and taken away, by name or by number; its late holder is refused", async () => {
    await takenAway(database.url, hf);
  });

  test("an ALTER that waits is in the middle of its chain, with those behind it", async () => {
    const [reader, changer, first, second, admin] = [
      await sessionAt(database.url),
      await sessionAt(database.url),
      await sessionAt(database.url),
      await sessionAt(database.url),
      await sessionAt(database.url),
    ];
    try {
      await reader.query("CREATE TABLE altered (id int PRIMARY KEY, n int)");
      await reader.query("INSERT INTO altered VALUES (1, 0)");
      await reader.query("BEGIN");
      await reader.query("SELECT * FROM altered");
      const waiting = [changer.query("ALTER TABLE altered ADD COLUMN m int")];
      await waitsFor(hf, 1, "altered");
      waiting.push(first.query("SELECT * FROM altered WHERE id = 1"), second.query("SELECT n FROM altered"));
      await waitsFor(hf, 3, "altered");
      const locks = (...args: string[]) => command(["locks", "--blocked", ...args, "--url", database.url]);
      interface Tree {
        readonly session: { readonly id: string };
        readonly waiters: readonly Tree[];
      }
      const flat = ({ session, waiters }: Tree): unknown[] => [session.id, ...waiters.map(flat)];
      const trees = async () =>
        (JSON.parse((await locks("--json")).out) as { chains: Tree[] }).chains
          .map(flat)
          // Named locks of other databases are told on MySQL too.
          .filter((tree) => tree.flat(9).includes(changer.id));
      const behind = [changer.id, ...[first.id, second.id].toSorted(byNumber).map((id) => [id])];
      if (server === "mariadb") {
        // It does not tell who has a table, unless a plugin is there: who it must be is told as such.
        expect(await trees()).toEqual([behind]);
        const [found, ...more] = await doctorOf(database.url, "waits");
        expect(more).toEqual([]);
        expect(found?.what).toMatch(
          new RegExp(
            `^session ${reader.id} of holdfast .*, the only transaction that was open before, probably is in the way of 3 sessions`,
          ),
        );
        expect(found?.fix).toMatch(new RegExp(`^holdfast kill ${reader.id} `));
        await admin.query("INSTALL SONAME 'metadata_lock_info'");
      }
      expect(await trees()).toEqual([[reader.id, behind]]);
      expect((await locks()).out).toMatch(
        new RegExp(`^[├└]─ ${changer.id} .*waits for altered +ALTER TABLE altered ADD COLUMN m int$`, "m"),
      );
      // Ending those who wait is nobody's advice.
      const [root, ...others] = await doctorOf(database.url, "waits");
      expect(others).toEqual([]);
      expect(root?.what).toContain(`session ${reader.id} of `);
      expect(root?.what).toContain("is in the way of 3 sessions");
      expect(root?.what).toContain(
        `2 of them stand behind session ${changer.id}, which waits too (ALTER TABLE altered ADD COLUMN m int)`,
      );
      expect(root?.fix).toMatch(new RegExp(`^holdfast kill ${reader.id}   # frees 3 sessions; in SQL: `));
      await reader.query("ROLLBACK");
      await Promise.all(waiting);
    } finally {
      if (server === "mariadb") await admin.query("UNINSTALL SONAME 'metadata_lock_info'").catch(() => {});
      for (const each of [reader, changer, first, second, admin]) each.end();
    }
  });

  test("a user without rights sees what there is to see, and is told what is hidden", async () => {
    const user = `poor_${database.name.slice(-8)}`;
    const admin = await sessionAt(database.url);
    const drop: string[] = [];
    const as = new URL(database.url);
    [as.username, as.password] = [user, "its-secret"];
    if (server === "postgres") {
      await admin.query(`CREATE ROLE ${user} LOGIN PASSWORD 'its-secret'`);
      drop.push(`DROP OWNED BY ${user}`, `DROP ROLE ${user}`);
    } else {
      await admin.query(`CREATE USER '${user}'@'%' IDENTIFIED BY 'its-secret'`);
      await admin.query(`GRANT CREATE ON ${database.name}.* TO '${user}'@'%'`);
      drop.push(`DROP USER '${user}'@'%'`);
    }
    const holder = locked(database.url, ["image-upload", "42"]);
    await holder.message("holding");
    const waiter = locked(database.url, ["image-upload", "42"]);
    try {
      await waitsFor(hf, 1, "image-upload:42");
      const { waiters } = await hf.inspect();
      const [waits] = waiters.filter(({ name }) => name.startsWith("image-upload:42"));
      const [has] = waits?.blockedBy ?? [];
      const poor = await command(["locks", "--url", as.href]);
      if (server === "postgres") {
        // Who waits for whom, but neither what they do, nor leases: which is said, and nothing else instead.
        expect(poor.code, poor.err).toBe(0);
        expect(poor.out).toMatch(new RegExp(`^${has} +postgres +shop +hidden +holds image-upload:42$`, "m"));
        expect(poor.out).toMatch(
          new RegExp(`^└─ ${waits?.session.id} +postgres +shop +hidden .*waits for image`, "m"),
        );
        expect(poor.err).toContain(
          `This user may not see leases: GRANT USAGE ON SCHEMA holdfast TO "${user}";`,
        );
        expect(poor.err).toContain(
          `hidden from this one, though not who waits for whom: GRANT pg_monitor TO "${user}";`,
        );
        const kill = await command(["kill", has ?? "", "--yes", "--url", as.href]);
        expect(kill.code).toBe(2);
        expect(kill.err).toContain(`Session ${has} (hidden, shop, postgres) holds image-upload:42.`);
        expect(kill.err).toContain(`This user may not end session ${has}.`);
        const waiterToo = await doctorOf(as.href, "waits");
        expect(waiterToo[0]?.what).toMatch(
          new RegExp(
            `^session ${has} of postgres \\(shop, what it does is hidden from this user\\) is in the way of 1 session`,
          ),
        );
      } else {
        const right = server === "mysql" ? "SELECT ON performance_schema.*" : "PROCESS ON *.*";
        expect(poor.code, poor.err).toBe(2);
        expect(poor.out).toBe("");
        expect(poor.err).toContain(
          `This user may not see locks, its own neither: GRANT ${right} TO '${user}'@'%';`,
        );
        expect(poor.err).toContain(`GRANT SELECT ON holdfast_lease TO '${user}'@'%';`);
        await admin.query(`GRANT ${right} TO '${user}'@'%'`);
        await admin.query(`GRANT SELECT ON ${database.name}.* TO '${user}'@'%'`);
        const richer = await command(["locks", "--url", as.href]);
        expect(richer.code, richer.err).toBe(0);
        if (server === "mysql") {
          expect(richer.out).toMatch(new RegExp(`^${has} +hidden .*holds image-upload:42$`, "m"));
          expect(richer.err).toContain(
            `though not who waits for whom: GRANT PROCESS ON *.* TO '${user}'@'%';`,
          );
          const kill = await command(["kill", has ?? "", "--yes", "--url", as.href]);
          expect(kill.code).toBe(2);
          expect(kill.err).toContain(`Session ${has} is another user's, which this one may not see`);
        } else expect(richer.err).toBe("");
      }
    } finally {
      holder.sigkill();
      waiter.sigkill();
      for (const statement of drop) await admin.query(statement);
      admin.end();
    }
  });
});

const byNumber = (a: string, b: string) => (a < b ? -1 : 1);

/** A session of somebody's, by hand. */
interface Hand {
  readonly id: string;
  query(text: string): Promise<unknown>;
  end(): void;
}

async function sessionAt(url: string): Promise<Hand> {
  if (url.startsWith("postgres")) {
    const client = new Client({ connectionString: url, application_name: "by hand" });
    client.on("error", () => {});
    await client.connect();
    const { rows } = await client.query<{ id: string }>("SELECT pg_backend_pid()::text AS id");
    return {
      id: rows[0]?.id ?? "",
      query: (text) => client.query(text),
      end: () => void client.end().catch(() => {}),
    };
  }
  const connection = await createConnection(url);
  connection.on("error", () => {});
  return {
    id: String(connection.threadId),
    query: (text) => connection.query(text),
    end: () => connection.destroy(),
  };
}

async function doctorOf(url: string, check: string): Promise<{ what: string; fix: string }[]> {
  let found: { what: string; fix: string }[] = [];
  await eventually(async () => {
    const { out } = await command(["doctor", "--only", check, "--json", "--url", url]);
    found = (JSON.parse(out) as { findings: { what: string; fix: string }[] }).findings;
    return found.length > 0;
  });
  return found;
}

/** As on a bad day: somebody has a lease, and is not to have it any more. */
async function takenAway(url: string, hf: Holdfast<unknown>): Promise<void> {
  const run = (...args: string[]) => command(["lease", ...args, "--url", url]);
  const name = key("export", 7);
  const lease = await hf.lease(name, { holder: "web-1:88", ttl: 10_000 });
  const next = hf.lease(name, { holder: "web-2:9", wait: 60_000 });
  const [all, shown, none, unasked, unnamed] = await Promise.all([
    run("--json"),
    run("show", "export:7"),
    run("show", "export:8"),
    run("end", "export:7"),
    run("end"),
  ]);
  const mine = { name: "export:7", holder: "web-1:88", fence: lease.fence, mode: "exclusive", over: false };
  expect((JSON.parse(all.out) as { leases: unknown[] }).leases).toEqual([expect.objectContaining(mine)]);
  expect(all.out).not.toContain("token");
  expect(shown.out).toMatch(/^holder +web-1:88$/m);
  expect(shown.out).toMatch(/^until +.* UTC \(.* unless it is renewed\)$/m);
  expect(none).toMatchObject({ code: 2, out: "" });
  expect(none.err).toContain('Nobody has a lease "export:8"');
  expect(unasked).toMatchObject({ code: 2, out: "" });
  expect(unasked.err).toContain("add --yes");
  expect(unnamed.err).toContain("Which lease?");

  const asked = terminal(["lease", "end", "export:7", "--note", "hangs", "--url", url], { columns: 60 });
  await see(asked, "Take the lease");
  const text = await asked.screen();
  for (const words of ["web-1:88", "fenced(tx, lease)"]) expect(text.replaceAll("\n", "")).toContain(words);
  asked.type("y\r");
  expect(await asked.ended).toBe(0);
  const after = await next;
  try {
    expect(after.fence).toBeGreaterThan(lease.fence);
    await expect(hf.transaction((tx) => fenced(tx, lease))).rejects.toThrow(StaleFenceError);
    await eventually(() => lease.signal.aborted);
    expect(await trail(hf, { target: "lease:export:7" })).toMatchObject([
      {
        action: "lease.end",
        outcome: "done",
        details: { holder: "web-1:88", fence: lease.fence, note: "hangs" },
        result: { ended: true },
      },
    ]);
    // By an earlier number nobody's is taken.
    expect(await run("end", "--fence", String(lease.fence), "--yes")).toMatchObject({ code: 2 });
  } finally {
    await after.release();
  }

  // One whose process is gone: it stays, says so, and can be cleared away.
  const dead = await hf.lease(key("dead"), { renew: false, ttl: 100, holder: "gone:1" });
  await eventually(async () => (await hf.leases(key("dead"))).length === 0);
  expect(await hf.leases(key("dead"), { over: true })).toMatchObject([{ fence: dead.fence, over: true }]);
  const words = await run("show", "dead");
  expect(words.out).toMatch(/^state +ran out, and was never given back/m);
  const cleared = await run("end", "--fence", String(dead.fence), "--yes", "--json");
  expect(JSON.parse(cleared.out)).toMatchObject({ lease: { name: "dead", over: true }, ended: true });
  expect(await hf.leases(undefined, { over: true })).toEqual([]);
}

describe("on PostgreSQL", () => {
  const reason = unavailable("postgres");
  let database: TestDatabase;
  let pool: Pool;
  let hf: Holdfast<unknown>;
  beforeEach(({ skip }) => skip(reason !== undefined, reason));
  beforeAll(async () => {
    if (reason !== undefined) return;
    database = await createDatabase("postgres");
    pool = new Pool({ connectionString: database.url, max: 8, application_name: "shop" });
    pool.on("error", () => {});
    hf = holdfast(fromPg(pool));
    await hf.migrate();
  });
  afterAll(async () => {
    await hf?.close();
    await pool?.end();
    await database?.drop();
  });

  async function session(url = database.url): Promise<{ client: Client; pid: string }> {
    const client = new Client({ connectionString: url, application_name: "by hand" });
    client.on("error", () => {});
    await client.connect();
    const { rows } = await client.query<{ pid: string }>("SELECT pg_backend_pid()::text AS pid");
    return { client, pid: rows[0]?.pid ?? "" };
  }

  test("kill cancels first, terminates what holds on, and says what is not of this database", async () => {
    const lock = "SELECT pg_advisory_xact_lock(holdfast.key('slow'))";
    const [statement, stubborn, elsewhere, waiter] = [
      await session(),
      await session(),
      await session(serverUrl("postgres")),
      await session(),
    ];
    const ended = statement.client
      .query(`BEGIN; ${lock}; SELECT pg_sleep(600)`)
      .catch((e: Error) => e.message);
    // A lock of the session outlives its statement.
    const gone = stubborn.client
      .query("SELECT pg_advisory_lock(7); SELECT pg_sleep(600)")
      .catch((e: Error) => e.message);
    await eventually(async () => (await hf.inspect()).holders.length === 2);
    const waiting = waiter.client.query(`BEGIN; ${lock}; COMMIT`);
    await waitsFor(hf);
    const pids = [statement.pid, stubborn.pid, elsewhere.pid];
    const { code, out, err } = await command([
      "kill",
      ...pids,
      "4000000",
      "--yes",
      "--patience",
      "300",
      "--json",
      "--url",
      database.url,
    ]);
    const nobody = { through: [], stillWaiting: [], again: [] };
    expect((JSON.parse(out) as { sessions: Killed[] }).sessions, err).toEqual([
      { session: statement.pid, done: "cancelled", through: [waiter.pid], stillWaiting: [], again: [] },
      { session: stubborn.pid, done: "terminated", ...nobody },
      { session: elsewhere.pid, done: "terminated", ...nobody },
    ]);
    // One of the four was not there.
    expect(code).toBe(2);
    expect(err).toContain("There is no session 4000000");
    expect(err).toContain("It is in the database postgres, not in this one");
    expect(await ended).toMatch(/canceling statement/);
    expect(await gone).toMatch(/canceling statement/);
    await waiting;
    for (const { client } of [stubborn, elsewhere]) await expect(client.query("SELECT 1")).rejects.toThrow();
    for (const { client } of [statement, waiter]) await client.end();
  });

  test.each([
    [
      "SELECT pg_advisory_xact_lock(8), 'hun''ter2', $x$hunter3$x$, E'\\'hunter4' AS \"as\"",
      'SELECT pg_advisory_xact_lock(?), ?, ?, ? AS "as"',
    ],
    ["SELECT pg_advisory_xact_lock(8) -- it's\n, 'hunter2'", "SELECT pg_advisory_xact_lock(?) , ?"],
    ["SELECT pg_advisory_xact_lock(8), 'C:\\', 'hunter2'", "SELECT pg_advisory_xact_lock(?), …"],
    // The server keeps its first 1,023 bytes.
    [
      `SELECT pg_advisory_xact_lock(8), 'hunter2${" hunter3".repeat(200)}'`,
      "SELECT pg_advisory_xact_lock(?), …",
    ],
  ])("nothing that may be secret is shown or kept of what a session ran: %s", async (text, shown) => {
    const { client, pid } = await session();
    await client.query("BEGIN");
    await client.query(text);
    const at = ["--url", database.url];
    const outputs = [
      await command(["locks", ...at]),
      await command(["locks", "--json", ...at]),
      await command(["kill", pid, "--yes", ...at]),
    ];
    for (const { code, out, err } of outputs) {
      expect(code, err).toBe(0);
      expect(`${out}${err}`).not.toContain("hunter");
    }
    expect(outputs[0]?.out).toContain(shown);
    const [line] = await trail(hf, { target: `session:${pid}` });
    expect(line?.details).toMatchObject({ statement: shown });
  });

  test("kill ends whoever is in the way also where nothing can be written down, and says so", async () => {
    const bare = await createDatabase("postgres");
    try {
      const holder = await session(bare.url);
      await holder.client.query("BEGIN; SELECT pg_advisory_xact_lock(7)");
      const unmigrated = await command(["kill", holder.pid, "--yes", "--url", bare.url]);
      expect(unmigrated.code, unmigrated.err).toBe(0);
      expect(unmigrated.err).toMatch(
        /This is not written down in an audit: The table holdfast\.audit is not in/,
      );
      expect(unmigrated.out).toContain(`Session ${holder.pid} was terminated.`);
    } finally {
      await bare.drop();
    }
    // Nor do locks and kill wait for whoever has locked our own tables.
    const greedy = await session();
    await greedy.client.query("BEGIN");
    await greedy.client.query(
      "LOCK TABLE holdfast.audit, holdfast.lease, holdfast.queue, holdfast.schedule_run",
    );
    await greedy.client.query("SELECT pg_advisory_xact_lock(7)");
    const locks = await command(["locks", "--url", database.url]);
    expect(locks.code, locks.err).toBe(0);
    expect(locks.out).toMatch(new RegExp(`^${greedy.pid} .* bigint 7 `, "m"));
    expect(locks.err).toContain("What is in lease, queue, schedule_run is not shown: somebody has locked it");
    const ended = await command(["kill", greedy.pid, "--yes", "--url", database.url]);
    expect(ended.code, ended.err).toBe(0);
    expect(ended.err).toContain("This is not written down in an audit: somebody has locked it");
    expect(ended.out).toContain(`Session ${greedy.pid} was terminated.`);
  });

  test("six sessions deep, at 60 columns: who, from where, what they run; and top the same of the selected one", async () => {
    await pool.query("CREATE TABLE deep (id int PRIMARY KEY, v int)");
    await pool.query("INSERT INTO deep SELECT n, 0 FROM generate_series(1, 7) n");
    const chain = await Promise.all(Array.from({ length: 7 }, () => session()));
    const waiting: Promise<unknown>[] = [];
    try {
      for (const [i, { client }] of chain.entries()) {
        await client.query("BEGIN");
        await client.query(`UPDATE deep SET v = ${i} WHERE id = ${i + 1} /* \u001b[2J */`);
        if (i > 0) waiting.push(client.query(`UPDATE deep d${i} SET v = v + 1 WHERE id = ${i}`));
        await waitsFor(hf, i, "deep");
      }
      const locks = terminal(["locks", "--url", database.url], { columns: 60, rows: 60 });
      expect(await locks.ended).toBe(0);
      const lines = (await locks.all()).split("\n");
      expect(lines.every((line) => line.length <= 60)).toBe(true);
      for (const [i, { pid }] of chain.entries()) {
        const at = lines.findIndex((line) => new RegExp(`^ *(?:└ )?${pid} `).test(line));
        expect(lines[at]?.indexOf(pid)).toBe(i * 2);
        expect(lines[at]).toContain(i === 0 ? "holds deep (0,1)" : `waits for deep (0,${i})`);
        const about = lines.slice(at + 1, at + 3).join("\n");
        expect(about).toContain("by hand, postgres@127.0.0.1");
        expect(about).toContain(i === 0 ? "UPDATE deep SET v = ?" : `UPDATE deep d${i} SET v = v + ?`);
      }
      const top = terminal(["top", "--url", database.url], { columns: 60, rows: 24 });
      try {
        await see(top, chain[6]?.pid ?? "");
        for (let i = 0; i < 6; i++) top.type("j");
        const screen = await see(top, /UPDATE deep d6 SET v = v \+ \? WHERE id = \?/);
        expect(screen).toContain("by hand, postgres@127.0.0.1");
        expect(screen.split("\n").filter((line) => /UPDATE/.test(line))).toHaveLength(1);
        top.type("q");
        expect(await top.ended).toBe(0);
      } finally {
        top.kill();
      }
      // One command, and all of them go on.
      const kill = await command(["kill", chain[0]?.pid ?? "", "--yes", "--url", database.url]);
      expect(kill.code, kill.err).toBe(0);
      for (const [i, { client }] of chain.entries()) {
        if (i === 0) continue;
        await waiting[i - 1];
        await client.query("COMMIT");
      }
    } finally {
      for (const { client } of chain) await client.end().catch(() => {});
    }
  });

  test("top shows holder and waiter, survives a lost connection, kills if asked, and restores the screen", async () => {
    const { hostname, port } = new URL(database.url);
    const proxy = await startProxy({ host: hostname, port: Number(port) });
    const holder = locked(database.url, ["image-upload", "42"]);
    await holder.message("holding");
    const waiter = locked(database.url, ["image-upload", "42"]);
    const top = terminal(["top", "--url", proxy.url(database.url)], { columns: 120, rows: 30 });
    try {
      await waitsFor(hf);
      const { holders, waiters } = await hf.inspect();
      const [has, waits] = [holders[0]?.session.id as string, waiters[0]?.session.id as string];
      const tree = new RegExp(
        `^${has} .*holds image-upload:42  .*\\n└─ ${waits} .*waits for image-upload:42  `,
        "m",
      );
      await see(top, tree);
      expect(await top.full()).toBe(true);
      top.resize(40, 10);
      // Drawn anew: the first line is the head, and the last one is the screen's last one again.
      await see(
        top,
        new RegExp(`^holdfast top(?:.*\\n){5}${has} (?:.*\\n){1,3}└ ${waits} (?:.*\\n){1,2}↑↓ j k select`),
      );
      top.resize(120, 24);
      await see(top, tree);

      proxy.cutWhen(() => "cut-before");
      proxy.cut();
      await see(top, "no connection");
      proxy.cutWhen(undefined);
      await see(top, /look \d/);

      // The waiter is below; its question is answered with no.
      top.type("j");
      top.type("x");
      await see(top, `End session ${waits}?`);
      top.type("n");
      await see(top, "Nothing was done.");
      top.type("\x1b[A");
      top.type("x");
      const question = await see(top, `End session ${has}?`);
      expect(question).toContain(`${waits} (shop) waits for image-upload:42`);
      top.type("y");
      await see(top, `Session ${has} was terminated.`);
      expect(await trail(hf, { target: `session:${has}` })).toMatchObject([
        { action: "kill", outcome: "done", result: { session: has, done: "terminated" } },
      ]);
      await waiter.message("holding");
      top.type("b");
      await see(top, "Nobody waits for a lock.");
      top.type("q");
      expect(await top.ended).toBe(0);
      expect(await top.full()).toBe(false);
      expect(await top.all()).toBe("");
    } finally {
      holder.sigkill();
      waiter.sigkill();
      top.kill();
      await proxy.close();
    }
    const stopped = terminal(["top", "--url", database.url]);
    await see(stopped, "quit");
    stopped.type("\x03");
    expect(await stopped.ended).toBe(130);
    expect(await stopped.full()).toBe(false);
    const none = await command(["top", "--url", database.url]);
    expect(none).toMatchObject({ code: 2, out: "" });
    expect(none.err).toMatch(/^holdfast: holdfast top needs a terminal[^\n]*\n$/);
  });

  test("keys: what a name is, by the server's own word", async () => {
    const seed = inject("seed");
    console.log(`keys: HOLDFAST_SEED=${seed}`);
    const next = random(seed);
    const int = (below: number) => Math.floor(next() * below);
    const alphabet = [
      "'",
      '"',
      "\\",
      ":",
      " ",
      "ü",
      "漢",
      "😀",
      "\x1b[2J",
      "\x07",
      "\r",
      "\u009b31m",
      "\u202e",
      "[",
      "]",
      "a",
      "-",
      "42",
      "$1",
      "%s",
    ];
    const part = () => Array.from({ length: 1 + int(6) }, () => alphabet[int(alphabet.length)]).join("");
    const names = Array.from({ length: 40 }, (): [string, ...string[]] => [
      part(),
      ...Array.from({ length: int(3) }, part),
    ]);
    const args = names.map((parts) => JSON.stringify(parts));
    const [told, text] = await Promise.all([
      command(["keys", "--json", "--database", "shop", "--", ...args]),
      command(["keys", "--", ...args]),
    ]);
    expect(told.code, told.err).toBe(0);
    expect(text.code, text.err).toBe(0);
    expect(text.out).not.toMatch(raw);
    interface Fact {
      readonly parts: string[];
      readonly bigint: string;
      readonly hex: string;
      readonly classid: number;
      readonly objid: number;
      readonly sqlByName?: string;
    }
    const { keys } = JSON.parse(told.out) as { keys: Fact[] };
    expect(keys.map(({ parts }) => parts)).toEqual(names);
    const { client, pid } = await session();
    try {
      for (const { parts, bigint, hex, classid, objid, sqlByName } of keys) {
        const { form } = key(...(parts as [string, ...string[]]));
        expect(bigint).toBe(String(form.kind === "name" && form.hash));
        expect(BigInt.asIntN(64, BigInt(`0x${hex}`))).toBe(BigInt(bigint));
        const { rows } = await client.query(
          `WITH taken AS MATERIALIZED (SELECT pg_advisory_lock(${bigint})::text AS x)
          SELECT holdfast.key(VARIADIC $1::text[])::text AS same, ${sqlByName ?? "NULL::bigint"}::text AS named, x FROM taken`,
          [parts],
        );
        expect(rows[0]).toMatchObject({ same: bigint, named: sqlByName === undefined ? null : bigint });
        const seen = await client.query(
          "SELECT FROM pg_locks WHERE pid = $1 AND classid::int8 = $2 AND objid::int8 = $3 AND objsubid = 1",
          [pid, classid, objid],
        );
        expect(seen.rows).toHaveLength(1);
      }
    } finally {
      await client.end();
    }
    // And back, from what pg_locks shows, among names on standard input, without a database.
    const one = keys[int(keys.length)] as Fact;
    const found = start(["keys", "--find", `${one.classid},${one.objid}`, "--names", "-", "--json"], {
      input: `${args.join("\n")}\n`,
    });
    const back = await found.done;
    expect(back.code, back.err).toBe(0);
    expect((JSON.parse(back.out) as { parts: string[] }).parts).toEqual(one.parts);
  });

  test("keys: namespaces in use, collisions, and the name of a lock that somebody has", async () => {
    const { form } = key("order", 7);
    const number = String(form.kind === "name" && form.hash);
    const hand = await session();
    const lease = await hf.lease(key("export", "7"));
    const held = await hf.hold([key("image-upload", 41), key("image-upload", 42)]);
    await hand.client.query(`SELECT pg_advisory_lock(${number})`);
    const waiting = hf.transaction({ lock: key("order", 7), wait: 60_000 }, async () => {});
    await pool.query("INSERT INTO holdfast.lock (id, name) VALUES ($1, $2)", [
      `n${number}`,
      "legacy\u001b[2J",
    ]);
    try {
      await waitsFor(hf);
      const [told, text, found, missing] = await Promise.all([
        command(["keys", "--json", "--url", database.url]),
        command(["keys", "--url", database.url]),
        command(["keys", "--find", number, "--url", database.url]),
        command(["keys", "--find", "0x1", "order:7", "--json"]),
      ]);
      expect(told.code, told.err).toBe(0);
      const { namespaces, collisions } = JSON.parse(told.out) as {
        namespaces: { namespace: string; keys: { name: string; bigint: string | null }[] }[];
        collisions: { bigint: string; names: string[]; bare: { session: string; same: boolean }[] }[];
      };
      const of = (name: string) => namespaces.find(({ namespace }) => namespace === name)?.keys;
      const hash = (...parts: [string, ...string[]]) => {
        const made = key(...parts).form;
        return String(made.kind === "name" && made.hash);
      };
      expect(of("export")).toEqual([{ name: "export:7", bigint: hash("export", "7") }]);
      expect(of("order")).toEqual([{ name: "order:7", bigint: number }]);
      // Of two locks of one session its label names the first.
      expect(of("image-upload")).toHaveLength(1);
      expect(collisions).toHaveLength(1);
      expect(collisions[0]?.names.toSorted()).toEqual(["legacy\u001b[2J", "order:7"]);
      expect(text.out).toContain("Collision: order:7 and legacy\\u001b[2J");
      expect(text.out).not.toMatch(raw);
      expect(found.out).toBe(`${number} is order:7\n`);
      expect(missing.code).toBe(1);
      expect((JSON.parse(missing.out) as { name: string | null }).name).toBeNull();
    } finally {
      await hand.client.end();
      await waiting;
      await held.release();
      await lease.release();
    }
  });
});

describe("behind PgBouncer in transaction mode", () => {
  const reason = unavailable("pgbouncer");
  beforeEach(({ skip }) => skip(reason !== undefined, reason));

  test("a transaction that is killed does not run again, whichever way the kill comes", async () => {
    const database = await createDatabase("postgres");
    const pooled = new URL(serverUrl("pgbouncer"));
    pooled.pathname = new URL(database.url).pathname;
    const pool = new Pool({ connectionString: pooled.href, max: 3 });
    // Nothing of ours is in the database: locks and notes need no tables.
    const hf = holdfast(fromPg(pool));
    try {
      for (const url of [database.url, pooled.href]) {
        const stopped = retried(hf, "stopped");
        const { code, err } = await killHolder(hf, "stopped", url);
        expect(code, err).toBe(0);
        expect(await stopped.done).toMatchObject({ code: "HF_KILLED", retryable: false });
        expect(stopped.runs()).toBe(1);
      }
    } finally {
      await hf.close();
      await pool.end();
      await database.drop();
    }
  });
});

test("MySQL's own name of a key is the one that keys tells", async ({ skip }) => {
  const reason = unavailable("mysql");
  skip(reason !== undefined, reason);
  const database = await createDatabase("mysql");
  const pool = createPool({ uri: database.url, connectionLimit: 3 });
  const hf = holdfast(fromMysql2(pool));
  try {
    await hf.migrate();
    await using _ = await hf.hold(key("image-upload", 42));
    const { out } = await command(["keys", "image-upload:42", "--json", "--url", database.url]);
    const name = (JSON.parse(out) as { keys: { getLock: string }[] }).keys[0]?.getLock;
    const [rows] = await pool.query("SELECT IS_USED_LOCK(?) AS holder", [name]);
    expect(Number((rows as { holder: number }[])[0]?.holder)).toBeGreaterThan(0);
  } finally {
    await hf.close();
    await pool.end();
    await database.drop();
  }
});

test("on SQLite locks names the process that writes, and so do kill and doctor", async ({ skip }) => {
  skip(process.platform !== "linux", "only Linux tells which process has locked a file");
  const folder = mkdtempSync(join(tmpdir(), "holdfast-locks-"));
  const [url, path] = [`file:${join(folder, "app.db")}`, join(folder, "app.db")];
  try {
    for (const mode of ["DELETE", "WAL"]) {
      const db = new DatabaseSync(path);
      db.exec(`PRAGMA journal_mode = ${mode}; CREATE TABLE IF NOT EXISTS t (v)`);
      db.close();
      const script = `const db = new (require("node:sqlite").DatabaseSync)(${JSON.stringify(path)});
        db.exec("BEGIN IMMEDIATE; INSERT INTO t VALUES (1)"); console.log("writing"); setInterval(() => {}, 1000)`;
      writeFileSync(join(folder, "the-writer.cjs"), script);
      const writer = spawn(process.execPath, ["the-writer.cjs"], {
        cwd: folder,
        stdio: ["ignore", "pipe", "inherit"],
      });
      try {
        await once(writer.stdout, "data");
        const [told, shown, refused, found] = await Promise.all([
          command(["locks", "--json", "--url", url]),
          command(["locks", "--url", url]),
          command(["kill", String(writer.pid), "--yes", "--url", url]),
          doctorOf(url, "waits"),
        ]);
        const { holders } = JSON.parse(told.out) as { holders: Seen[] };
        expect(holders, told.err).toMatchObject([
          {
            session: {
              id: String(writer.pid),
              application: expect.stringContaining("the-writer"),
              state: "writing",
            },
          },
        ]);
        expect(shown.out).toMatch(new RegExp(`^${writer.pid} .*writing .*the write lock of the file`, "m"));
        expect(refused.code).toBe(2);
        expect(refused.err).toMatch(
          new RegExp(`: process ${writer.pid} \\(.*the-writer.cjs\\) writes to it`),
        );
        expect(found[0]?.what).toMatch(
          new RegExp(`^process ${writer.pid} \\(.*the-writer.cjs\\) is the file's writer`),
        );
        expect(found[0]?.fix).toMatch(new RegExp(`^kill ${writer.pid} `));
      } finally {
        writer.kill("SIGKILL");
        await once(writer, "exit");
      }
    }
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
});

test("on SQLite a lease is listed, shown and taken away", async () => {
  const folder = mkdtempSync(join(tmpdir(), "holdfast-locks-"));
  const path = join(folder, "app.db");
  const hf = holdfast(fromNodeSqlite(() => new DatabaseSync(path)));
  try {
    await hf.migrate();
    await takenAway(`file:${path}`, hf);
  } finally {
    await hf.close();
    rmSync(folder, { recursive: true, force: true });
  }
});

test("on SQLite locks shows leases, and kill says why it cannot", async () => {
  const folder = mkdtempSync(join(tmpdir(), "holdfast-locks-"));
  const url = `file:${join(folder, "app.db")}`;
  const path = join(folder, "app.db");
  const hf = holdfast(fromNodeSqlite(() => new DatabaseSync(path)));
  try {
    await hf.migrate();
    const lease = await hf.lease(key("export", 7), { holder: "worker\u001b[2J 1" });
    const [shown, refused] = await Promise.all([
      command(["locks", "--url", url]),
      command(["kill", "1", "--yes", "--url", url]),
    ]);
    expect(shown.out).toMatch(/worker\\u001b\[2J 1 .*export:7 \(lease, fence 1, /);
    expect(shown.out).not.toMatch(raw);
    expect(refused).toMatchObject({ code: 2, out: "" });
    expect(refused.err).toMatch(/^holdfast: SQLite has no sessions to end[^\n]*worker[^\n]*\n$/);
    await lease.release();
  } finally {
    await hf.close();
    rmSync(folder, { recursive: true, force: true });
  }
});
