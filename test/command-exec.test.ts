/** `holdfast exec` and `holdfast hold`: processes that start at once, are killed, and lose their connections. */
import { spawn } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { setTimeout as sleep } from "node:timers/promises";
import { type Holdfast, holdfast, key } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { createPool } from "mysql2/promise";
import { Pool } from "pg";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { openTransaction } from "../packages/cli/src/exec/open-transaction.ts";
import { type Running, command, start } from "./harness/command.ts";
import { type TestDatabase, createDatabase, serverUrl, unavailable } from "./harness/databases.ts";
import { eventually } from "./harness/wait.ts";

let folder: string;
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), "holdfast-exec-"));
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

/** Signal 0 asks whether it is there. One that has ended and was not waited for is not. */
function isThere(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return !/^State:\s*Z/m.test(readFileSync(`/proc/${pid}/status`, "utf8"));
  } catch {
    return false;
  }
}

const said = (running: Running, what: string | RegExp) =>
  eventually(() => {
    const all = running.out() + running.err();
    return typeof what === "string" ? all.includes(what) : what.test(all);
  });

const pids = async (running: Running, count: number): Promise<number[]> => {
  await eventually(() => (running.out().match(/^\d+$/gm)?.length ?? 0) >= count);
  return (running.out().match(/^\d+$/gm) ?? []).map(Number);
};

const begun: Running[] = [];

const exec = (url: string, args: readonly string[], script: string, ...rest: string[]): Running => {
  const running = start(["exec", "--url", url, ...args, "--", "sh", "-c", script, ...rest]);
  begun.push(running);
  return running;
};

// A test that failed has left something that runs for ten minutes: whatever said its number.
afterEach(() => {
  for (const running of begun.splice(0)) {
    if (running.child.exitCode !== null || running.child.signalCode !== null) continue;
    running.child.kill("SIGKILL");
    for (const pid of running.out().match(/^\d{2,}$/gm) ?? [])
      if (isThere(Number(pid))) process.kill(Number(pid), "SIGKILL");
  }
});

interface Place {
  readonly url: string;
  readonly hf: Holdfast<unknown>;
  query(text: string): Promise<unknown>;
  close(): Promise<void>;
}

async function open(server: "postgres" | "postgresOld" | "mysql" | "mariadb"): Promise<Place> {
  const database: TestDatabase = await createDatabase(server);
  if (server !== "mysql" && server !== "mariadb") {
    const pool = new Pool({ connectionString: database.url, max: 3 });
    const hf = holdfast(fromPg(pool));
    const close = async () => {
      await hf.close();
      await pool.end();
      await database.drop();
    };
    await hf.migrate();
    return { url: database.url, hf, query: (text) => pool.query(text), close };
  }
  const pool = createPool({ uri: database.url, connectionLimit: 3 });
  const hf = holdfast(fromMysql2(pool));
  const close = async () => {
    await hf.close();
    await pool.end();
    await database.drop();
  };
  await hf.migrate();
  return { url: database.url, hf, query: (text) => pool.query(text), close };
}

/** The session that has this key. */
async function holderOf({ hf }: Place, name: string): Promise<string> {
  const found = await eventually(
    async () => (await hf.inspect()).holders.find((lock) => lock.name.startsWith(name)) ?? false,
    { interval: 150 },
  );
  return found === false ? "" : found.session.id;
}

describe.each(["postgres", "mysql", "mariadb"] as const)("on %s", (server) => {
  const reason = unavailable(server);
  let place: Place;
  beforeEach(({ skip }) => skip(reason !== undefined, reason));
  beforeAll(async () => {
    if (reason === undefined) place = await open(server);
  });
  afterAll(() => place?.close());

  test("a connection that is lost ends the command and what it has started, with 70", async () => {
    const both = ["--lock", "report:1", "--grace", "300"];
    // One ends if asked; the other does not, and has a child.
    const polite = exec(place.url, ["--lock", "report:2"], "echo $$; exec sleep 600");
    const deaf = exec(place.url, both, "trap '' TERM; echo $$; sleep 601 & echo $!; wait; sleep 602");
    const going = exec(
      place.url,
      ["--lock", "report:3", "--keep-going"],
      `echo $$; while [ ! -e ${folder}/${server} ]; do sleep 0.1; done; exit 9`,
    );
    const there = [...(await pids(polite, 1)), ...(await pids(deaf, 2))];
    await pids(going, 1);
    expect(there.every(isThere)).toBe(true);
    for (const key of ["report:1", "report:2", "report:3"]) {
      const session = await holderOf(place, key);
      await place.query(
        server === "postgres" ? `SELECT pg_terminate_backend(${session})` : `KILL ${session}`,
      );
    }
    for (const running of [polite, deaf]) {
      const { code, err } = await running.done;
      expect(code, err).toBe(70);
      expect(err).toMatch(
        /^holdfast: The lock report:\d can no longer be relied on: [^\n]*Ending the command\.$/m,
      );
    }
    expect(there.filter(isThere)).toEqual([]);
    await said(going, "goes on without it");
    writeFileSync(join(folder, server), "");
    expect((await going.done).code).toBe(9);
  });
});

describe("on PostgreSQL", () => {
  const reason = unavailable("postgres");
  let place: Place;
  beforeEach(({ skip }) => skip(reason !== undefined, reason));
  beforeAll(async () => {
    if (reason === undefined) place = await open("postgres");
  });
  afterAll(() => place?.close());

  test("five at once with --skip: it runs once", async () => {
    const [log, go] = [join(folder, "ran"), join(folder, "go")];
    // It takes until the others have come and gone.
    const script = `echo ran >> ${log}; while [ ! -e ${go} ]; do sleep 0.1; done`;
    const five = Array.from({ length: 5 }, () => exec(place.url, ["--lock", "once", "--skip"], script));
    let ended = 0;
    for (const { done } of five) void done.then(() => ended++);
    await eventually(() => ended === 4);
    writeFileSync(go, "");
    const outcomes = await Promise.all(five.map(({ done }) => done));
    expect(outcomes.map(({ code }) => code)).toEqual([0, 0, 0, 0, 0]);
    expect(readFileSync(log, "utf8")).toBe("ran\n");
    expect(
      outcomes.filter(({ err }) => /once is held by \d+ \(holdfast exec.*: skipped\./.test(err)),
    ).toHaveLength(4);
  });

  test("a holder that is killed lets the next one run; --wait ends with 75, and says who has it", async () => {
    const holder = exec(place.url, ["--lock", "a:1", "--lock", "b:2"], "echo $$; exec sleep 600");
    const [orphan = 0] = await pids(holder, 1);
    try {
      const next = exec(place.url, ["--lock", "b:2"], "echo got $HOLDFAST_LOCK$HOLDFAST_FENCE");
      const [session, late] = await Promise.all([
        // Of its two locks one is in its label.
        holderOf(place, ""),
        command(["exec", "--url", place.url, "--lock", "a:1", "--wait", "200", "--", "echo", "no"]),
        said(next, /b:2 is held by .*: waiting\./),
      ]);
      expect(late).toMatchObject({ code: 75, out: "" });
      expect(late.err).toMatch(
        new RegExp(`^holdfast: a:1 is held by ${session} \\(holdfast exec.*; waited 200 ms[^\\n]*\\n$`),
      );
      expect(next.out()).toBe("");
      holder.child.kill("SIGKILL");
      const { code, out } = await next.done;
      expect({ code, out }).toEqual({ code: 0, out: "got b:2\n" });
      // As the documentation says: nobody could end it.
      expect(isThere(orphan)).toBe(true);
    } finally {
      process.kill(orphan, "SIGKILL");
    }
  });

  test("exit codes and signals are passed on, and what stands after the command is the command's", async () => {
    const run = (...words: string[]) =>
      command(["exec", "--url", place.url, "--lock", words.join("-"), ...words]);
    const folderItself = run("--", folder);
    const [seven, killed, missing, denied] = await Promise.all([
      run("sh", "-c", "exit 7"),
      run("sh", "-c", "kill -9 $$"),
      run("--", join(folder, "nothing")),
      folderItself,
    ]);
    expect([seven, killed, missing, denied].map(({ code }) => code)).toEqual([7, 137, 127, 126]);
    expect(missing.err).toContain("command not found");
    const trapped = exec(
      place.url,
      ["--lock", "trapped"],
      "trap 'echo ended; exit 3' TERM; echo $$; while :; do sleep 0.1; done",
    );
    await pids(trapped, 1);
    trapped.child.kill("SIGTERM");
    const { code, out } = await trapped.done;
    expect(code).toBe(3);
    expect(out).toContain("ended");
  });

  test("hold says who waits, and releases on Ctrl-C; whoever waits can be stopped too", async () => {
    const hold = start(["hold", "maintenance", "--url", place.url]);
    await said(hold, "maintenance is held (lock of a session)");
    const [waiter, stopped] = [
      exec(place.url, ["--lock", "maintenance"], "echo got"),
      exec(place.url, ["--lock", "maintenance", "--quiet"], "echo got"),
    ];
    await said(hold, /(?:^\d+ \(holdfast exec.*\) waits for it\.$[^]*){2}/m);
    stopped.child.kill("SIGTERM");
    expect(await stopped.done).toMatchObject({ code: 143, out: "", err: "" });
    hold.child.kill("SIGINT");
    const { code, out } = await hold.done;
    expect(code, out).toBe(0);
    expect(out).toContain("maintenance is released");
    expect(await waiter.done).toMatchObject({ code: 0, out: "got\n" });

    const lost = start(["hold", "maintenance", "--url", place.url]);
    await said(lost, "is held");
    await place.query(`SELECT pg_terminate_backend(${await holderOf(place, "maintenance")})`);
    const end = await lost.done;
    expect(end.code).toBe(70);
    expect(end.err).toMatch(/^holdfast: maintenance was lost: [^\n]*\n$/);
  });

  test("with --lease it has both: either is in the way, and the loss of either ends the command", async () => {
    const leased = exec(
      place.url,
      ["--lock", "export:8", "--lease"],
      "echo $HOLDFAST_FENCE; echo $$; exec sleep 600",
    );
    const [fence, pid = 0] = await pids(leased, 2);
    expect(await place.hf.leases()).toMatchObject([{ name: "export:8", fence }]);
    expect(await place.hf.tryLock(key("export", 8), async () => {})).toEqual({ acquired: false });
    expect(await place.hf.lease(key("export", 8), { wait: "skip" })).toBeUndefined();
    await place.query(`SELECT pg_terminate_backend(${await holderOf(place, "export:8")})`);
    const { code, err } = await leased.done;
    expect(code, err).toBe(70);
    expect(err).toMatch(/^holdfast: under export:8 \(lock of a session; lease, fence \d+\): sh$/m);
    expect(isThere(pid)).toBe(false);
    expect(await place.hf.leases()).toEqual([]);
  });

  test("a lease has a fence, and its loss ends the command", async () => {
    const leased = exec(
      place.url,
      ["--lock", "export:7", "--lease", "--ttl", "1500"],
      "echo $HOLDFAST_FENCE; echo $$; exec sleep 600",
    );
    const [fence, pid = 0] = await pids(leased, 2);
    expect(await place.hf.leases()).toMatchObject([{ name: "export:7", fence }]);
    await place.query("DELETE FROM holdfast.lease");
    const { code, err } = await leased.done;
    expect(code, err).toBe(70);
    expect(isThere(pid)).toBe(false);
  });
});

describe("behind PgBouncer in transaction mode", () => {
  const reason = unavailable("pgbouncer");
  beforeEach(({ skip }) => skip(reason !== undefined, reason));
  let direct: Place;
  let pool: Pool;
  let pooled: { readonly url: string; readonly hf: Holdfast<unknown> };
  beforeAll(async () => {
    if (reason !== undefined) return;
    direct = await open("postgres");
    const url = new URL(serverUrl("pgbouncer"));
    url.pathname = new URL(direct.url).pathname;
    pool = new Pool({ connectionString: url.href, max: 40 });
    pooled = { url: url.href, hf: holdfast(fromPg(pool)) };
  });
  afterAll(async () => {
    await pooled?.hf.close();
    await pool?.end();
    await direct?.close();
  });

  test("it is a lock of a transaction that stays open, which excludes every other way", async () => {
    // However long the server lets a transaction be, or be idle.
    const limits = ["transaction_timeout = '2s'", "idle_in_transaction_session_timeout = '12s'"];
    const name = new URL(direct.url).pathname.slice(1);
    for (const limit of limits) await direct.query(`ALTER DATABASE "${name}" SET ${limit}`);
    const go = join(folder, "pooled-go");
    const running = exec(
      pooled.url,
      ["--lock", "a:1"],
      `echo "fence:$HOLDFAST_FENCE"; while [ ! -e ${go} ]; do sleep 0.1; done; exit 4`,
    );
    await said(running, "fence:\n");
    for (const { hf } of [direct, pooled]) {
      expect(await hf.tryLock(key("a", 1), async () => {})).toEqual({ acquired: false });
      await expect(hf.transaction({ lock: key("a", 1), wait: 1000 }, async () => {})).rejects.toMatchObject({
        code: "HF_LOCK_TIMEOUT",
      });
    }
    expect(await direct.hf.hold(key("a", 1), { wait: "skip" })).toBeUndefined();
    for (const url of [direct.url, pooled.url])
      for (const how of [[], ["--lease"]]) {
        const other = await exec(url, ["--lock", "a:1", "--skip", ...how], "echo no").done;
        expect({ code: other.code, out: other.out }, other.err).toEqual({ code: 0, out: "" });
        expect(other.err).toMatch(/a:1 is held by .*holdfast exec.*: skipped\./);
      }
    // Vacuum has nothing to wait for: it has no id, and between its statements no snapshot.
    const session = await holderOf(direct, "a:1");
    const about = `SELECT backend_xid, backend_xmin, state FROM pg_stat_activity WHERE pid = ${session}`;
    await eventually(async () =>
      expect(((await direct.query(about)) as { rows: unknown[] }).rows).toEqual([
        { backend_xid: null, backend_xmin: null, state: "idle in transaction" },
      ]),
    );
    const long = `SELECT 1 FROM pg_stat_activity WHERE pid = ${session} AND xact_start < now() - interval '14 s'`;
    await eventually(async () => ((await direct.query(long)) as { rowCount: number }).rowCount === 1, {
      timeout: 60_000,
    });
    expect(isThere(running.child.pid as number)).toBe(true);
    writeFileSync(go, "");
    const { code, err } = await running.done;
    expect(code, err).toBe(4);
    expect(err).toContain(
      "a lock of a transaction that stays open, and not of a session: a pooler in transaction",
    );
    // And the other way round.
    const held = await direct.hf.hold(key("a", 1));
    const refused = await exec(pooled.url, ["--lock", "a:1", "--wait", "1500"], "echo no").done;
    expect({ code: refused.code, out: refused.out }, refused.err).toEqual({ code: 75, out: "" });
    await held.release();
    for (const limit of limits) await direct.query(`ALTER DATABASE "${name}" RESET ${limit.split(" ")[0]}`);
  });

  test("its loss ends the command; a holder that is killed lets the next one run", async () => {
    const lost = exec(pooled.url, ["--lock", "b:1"], "echo $$; exec sleep 600");
    const [pid = 0] = await pids(lost, 1);
    await direct.query(`SELECT pg_terminate_backend(${await holderOf(direct, "b:1")})`);
    const { code, err } = await lost.done;
    expect(code, err).toBe(70);
    expect(err).toMatch(/^holdfast: The lock b:1 can no longer be relied on: [^\n]*Ending the command\.$/m);
    expect(isThere(pid)).toBe(false);
    const killed = exec(pooled.url, ["--lock", "b:1"], "echo $$; exec sleep 600");
    const [orphan = 0] = await pids(killed, 1);
    const next = exec(direct.url, ["--lock", "b:1"], "echo got");
    await said(next, /b:1 is held by .*: waiting\./);
    killed.child.kill("SIGKILL");
    expect(await next.done).toMatchObject({ code: 0, out: "got\n" });
    process.kill(orphan, "SIGKILL");
  });

  test("those who wait leave the pooler's connections to others", async () => {
    const lock = [{ key: key("c", 1), mode: "exclusive" }] as const;
    await using held = await direct.hf.hold(key("c", 1));
    const stop = new AbortController();
    // More than the pooler has connections for.
    const waiting = Array.from({ length: 25 }, () =>
      openTransaction(pooled.hf, lock, 600_000, stop.signal).catch((error: unknown) => error),
    );
    await eventually(async () => {
      const { waiters } = await direct.hf.inspect();
      expect(waiters.filter(({ name }) => name.startsWith("c:1")).length).toBeGreaterThan(0);
    });
    // By then all of them would have come, and stayed.
    for (let i = 0; i < 30; i++) {
      await pool.query("SELECT 1");
      await sleep(100);
    }
    expect(held.signal.aborted).toBe(false);
    stop.abort(new Error("enough"));
    for (const ended of await Promise.all(waiting)) expect(ended).toBeInstanceOf(Error);
  });
});

// As behind a pooler, of which there is none here for these.
describe.each(["postgresOld", "mysql", "mariadb"] as const)(
  "a transaction that stays open, on %s",
  (server) => {
    const reason = unavailable(server);
    beforeEach(({ skip }) => skip(reason !== undefined, reason));

    test("excludes locks of transactions and of sessions, until it is released or lost", async () => {
      const place = await open(server);
      const lock = [{ key: key("d", 1), mode: "exclusive" }] as const;
      const { signal } = new AbortController();
      try {
        const first = await openTransaction(place.hf, lock, 0, signal);
        expect(await place.hf.tryLock(key("d", 1), async () => {}, { separate: true })).toEqual({
          acquired: false,
        });
        expect(await place.hf.hold(key("d", 1), { wait: "skip" })).toBeUndefined();
        await expect(openTransaction(place.hf, lock, 1, signal)).rejects.toMatchObject({
          code: "HF_LOCK_TIMEOUT",
        });
        await first.release();
        const held = await place.hf.hold(key("d", 1));
        await expect(openTransaction(place.hf, lock, 0, signal)).rejects.toMatchObject({
          code: "HF_LOCK_NOT_AVAILABLE",
        });
        await held.release();
        const second = await openTransaction(place.hf, lock, 10_000, signal);
        const session = await holderOf(place, "d:1");
        await place.query(
          server === "postgresOld" ? `SELECT pg_terminate_backend(${session})` : `KILL ${session}`,
        );
        await eventually(() => second.lost.aborted);
        expect(second.lost.reason).toMatchObject({ code: "HF_LOCK_LOST" });
        await expect(second.release()).rejects.toThrow();
      } finally {
        await place.close();
      }
    });
  },
);

test("on SQLite it has to be a lease, and one at a time", async () => {
  const path = join(folder, "app.db");
  const hf = holdfast(fromNodeSqlite(() => new DatabaseSync(path)));
  await hf.migrate();
  await hf.close();
  const unsaid = await exec(`file:${path}`, ["--lock", "a:1"], "echo no").done;
  expect(unsaid).toMatchObject({ code: 2, out: "" });
  expect(unsaid.err).toMatch(
    /^holdfast: No lock can be held for as long as a command runs: [^\n]*--lease[^\n]*\n$/,
  );
  const go = join(folder, "sqlite-go");
  const first = exec(
    `file:${path}`,
    ["--lock", "a:1", "--lease"],
    `echo $$; while [ ! -e ${go} ]; do sleep 0.1; done`,
  );
  await pids(first, 1);
  const busy = await exec(`file:${path}`, ["--lock", "a:1", "--lease", "--wait", "100"], "echo no").done;
  expect(busy).toMatchObject({ code: 75, out: "" });
  expect(busy.err).toContain(`:${first.child.pid} (holding, `);
  writeFileSync(go, "");
  const { code, err } = await first.done;
  expect(code, err).toBe(0);
  expect(err).toContain("a lease alone, which does not exclude transactions that lock the key: ");
  expect(existsSync(path)).toBe(true);
  // Somebody else writes to the file: nobody is known to have the key, so it is not skipped either.
  using writer = new DatabaseSync(path);
  writer.exec("BEGIN IMMEDIATE");
  for (const how of [["--wait", "100"], ["--skip"]]) {
    const refused = await exec(`file:${path}`, ["--lock", "b:1", "--lease", ...how], "echo no").done;
    expect(refused).toMatchObject({ code: 75, out: "" });
    expect(refused.err).toContain("somebody else writes to the file");
  }
  const patient = exec(`file:${path}`, ["--lock", "b:1", "--lease"], "echo yes");
  writer.exec("ROLLBACK");
  expect(await patient.done).toMatchObject({ code: 0, out: "yes\n" });
});

/** One key, taken in every way there is, by many at once, some of whom are killed: never two. */
describe.each(["postgres", "mysql", "mariadb"] as const)("one key on %s", (server) => {
  const reason = unavailable(server);
  beforeEach(({ skip }) => skip(reason !== undefined, reason));

  test("is one at a time, whatever the way", { timeout: 600_000 }, async ({ skip }) => {
    const why = server === "postgres" ? unavailable("pgbouncer") : undefined;
    skip(why !== undefined, why);
    const place = await open(server);
    const urls = [place.url];
    const hfs = [place.hf];
    const pools: Pool[] = [];
    if (server === "postgres") {
      const url = new URL(serverUrl("pgbouncer"));
      url.pathname = new URL(place.url).pathname;
      urls.push(url.href);
      pools.push(new Pool({ connectionString: url.href, max: 3 }));
      hfs.push(...pools.map((pool) => holdfast(fromPg(pool))));
    }
    const name = `storm:${server}`;
    const lock = key("storm", server);
    const [file, log] = [join(folder, `${server}.lock`), join(folder, `${server}.log`)];
    writeFileSync(log, "");
    // The system frees it with the last process that has it. Whoever finds it taken is not alone.
    const script = `exec 9>${file}; flock -n 9 || echo both >> ${log}; echo in >> ${log}; echo $$; sleep 0.$1; echo out >> ${log}`;
    const alone = async () => {
      const { code } = await new Promise<{ code: number | null }>((resolve) =>
        spawn("sh", ["-c", script, "sh", "1"], { stdio: "ignore" }).once("close", (code) =>
          resolve({ code }),
        ),
      );
      expect(code).toBe(0);
    };
    /** With everything that it has started, so that nothing goes on without the lock. */
    const kill = async (running: Running, pid: number) => {
      running.child.kill("SIGSTOP");
      process.kill(-pid, "SIGKILL");
      await eventually(() => !isThere(pid));
      running.child.kill("SIGKILL");
      await running.done;
    };
    const ways = urls.flatMap((url) => [[], ["--lease", "--ttl", "8000"]].map((how) => ({ url, how })));
    const rounds = process.env["HOLDFAST_LONG"] ? 20 : 3;
    let [entered, killed] = [0, 0];
    try {
      for (let round = 0; round < rounds; round++) {
        const running = ways.flatMap(({ url, how }) =>
          [[], ["--wait", "300000"]].map((patience) =>
            exec(url, ["--lock", name, ...how, ...patience], script, "sh", "2"),
          ),
        );
        entered += running.length;
        const victims = new Set(running.filter((_, i) => i % 3 === round % 3));
        await Promise.all([
          ...running.map(async (each) => {
            if (!victims.has(each)) {
              const { code, err } = await each.done;
              expect(code, err).toBe(0);
              return;
            }
            const [pid = 0] = await pids(each, 1);
            // It may have ended.
            if (!isThere(pid)) return;
            killed++;
            await kill(each, pid);
          }),
          ...hfs.map(async (hf) => {
            for (let i = 0; i < 3; i++)
              await hf.transaction({ lock, wait: 300_000, deadline: 600_000 }, async () => alone());
          }),
          (async () => {
            for (let i = 0; i < 3; i++) {
              await using held = await place.hf.hold(lock, { wait: 300_000 });
              await alone();
              expect(held.signal.aborted).toBe(false);
            }
          })(),
        ]);
        entered += hfs.length * 3 + 3;
      }
      const lines = readFileSync(log, "utf8").split("\n");
      expect(lines.filter((line) => line === "both")).toEqual([]);
      expect(lines.filter((line) => line === "in")).toHaveLength(entered);
      expect(killed).toBeGreaterThan(0);
    } finally {
      for (const hf of hfs.slice(1)) await hf.close();
      for (const pool of pools) await pool.end();
      await place.close();
    }
  });
});

describe.each(["mysql", "mariadb"] as const)("--shared on %s", (server) => {
  const reason = unavailable(server);
  beforeEach(({ skip }) => skip(reason !== undefined, reason));

  test("is refused, with a lease too: locks cannot be shared there", async () => {
    const place = await open(server);
    try {
      for (const how of [[], ["--lease"]]) {
        const { code, out, err } = await exec(place.url, ["--lock", "a:1", "--shared", ...how], "echo no")
          .done;
        expect({ code, out }).toEqual({ code: 2, out: "" });
        expect(err).toMatch(/^holdfast: --shared: locks cannot be shared here: [^\n]+\n$/);
      }
    } finally {
      await place.close();
    }
  });
});

test("a mistake is one line, and 2", async () => {
  const outcomes = await Promise.all([
    command(["exec", "--lock", "a::b", "--url", "postgres://localhost:1/x", "--", "true"]),
    command(["exec", "--lock", "a", "--", "true"]),
    command(["exec", "--lock", "a", "--url", "postgres://u:secret@127.0.0.1:1/x", "--", "true"]),
  ]);
  for (const { code, out, err } of outcomes) {
    expect({ code, out }).toEqual({ code: 2, out: "" });
    expect(err).toMatch(/^holdfast: [^\n]+\n$/);
    expect(err).not.toContain("secret");
  }
});
