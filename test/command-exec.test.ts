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

const pids = async (running: Running, count: number, timeout = 30_000): Promise<number[]> => {
  await eventually(() => (running.out().match(/^\d+$/gm)?.length ?? 0) >= count, { timeout });
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

  test("who follows a command that was cut off fails; the doctor, locks and kill know what runs", async () => {
    const args = ["--lock", "migrate:1", "--follow"];
    const secret = "PGPASSWORD=hush";
    const leader = exec(place.url, args, `echo $$; exec sleep 600 # ${secret}`);
    await pids(leader, 1);
    const follower = exec(place.url, args, "echo ran");
    await said(follower, /migrate:1 is held by \d+ \(holdfast exec: `sh -c .*waiting until it has ended/);
    const session = await holderOf(place, "migrate:1");
    const about = new RegExp(
      `holdfast exec is running \`sh -c .*\` since .* on .* \\(process ${leader.child.pid}, session ${session}\\)`,
    );
    await eventually(
      async () => {
        const { out, err } = await command(["doctor", "--only", "waits", "--json", "--url", place.url]);
        const { findings } = JSON.parse(out) as {
          findings: { severity: string; what: string; fix: string }[];
        };
        expect(findings, err).toMatchObject([{ severity: "hint" }]);
        expect(findings[0]?.what).toMatch(about);
        expect(findings[0]?.what).not.toContain("hush");
        expect(findings[0]?.fix).toContain(`kill ${leader.child.pid}   # `);
        expect(findings[0]?.fix).not.toMatch(/holdfast kill|pg_terminate_backend|KILL \d/);
      },
      { interval: 500 },
    );
    const locks = await command(["locks", "--url", place.url]);
    expect(locks.out).toMatch(/migrate:1 .*holdfast exec: `sh -c /);
    const asked = await command(["kill", session, "--url", place.url]);
    expect(asked.err).toMatch(
      /it is holdfast exec, which runs `sh -c .* since .*: its end cuts the command off/,
    );
    expect(leader.child.exitCode).toBeNull();
    await command(["kill", session, "--yes", "--watch", "0", "--url", place.url]);
    expect((await leader.done).code).toBe(70);
    const { code, out, err } = await follower.done;
    expect({ code, out }, err).toEqual({ code: 70, out: "" });
    expect(err).toMatch(/, which this one followed, (?:was cut off|failed with exit code 70)/);
  });

  test("a connection that is lost ends the command and what it has started, with 70", async () => {
    const both = ["--lock", "report:1", "--grace", "300"];
    // One ends if asked; the other does not, and has a child.
    const polite = exec(place.url, ["--lock", "report:2"], "echo $$; exec sleep 600");
    // Of its children one has a session of its own, and another one lost its parent, too.
    const away = "setsid sleep 603 & echo $!; sh -c 'setsid sleep 604 & echo $!'";
    const deaf = exec(
      place.url,
      both,
      `trap '' TERM; echo $$; sleep 601 & echo $!; ${away}; wait; sleep 602`,
    );
    const going = exec(
      place.url,
      ["--lock", "report:3", "--keep-going"],
      `echo $$; while [ ! -e ${folder}/${server} ]; do sleep 0.1; done; exit 9`,
    );
    const there = [...(await pids(polite, 1)), ...(await pids(deaf, 4))];
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

interface FollowPlace {
  readonly url: string;
  readonly how: readonly string[];
  /** Another holder of the key, who runs no command. */
  hold(name: string): Promise<AsyncDisposable>;
  close(): Promise<void>;
}

const followPlaces = {
  postgres: { needs: ["postgres"] },
  mysql: { needs: ["mysql"] },
  mariadb: { needs: ["mariadb"] },
  pgbouncer: { needs: ["postgres", "pgbouncer"] },
  sqlite: { needs: [] },
} as const;

async function followPlace(name: keyof typeof followPlaces): Promise<FollowPlace> {
  if (name === "sqlite") {
    const path = join(folder, "follow.db");
    const hf = holdfast(fromNodeSqlite(() => new DatabaseSync(path)));
    await hf.migrate();
    // A killed leader's lease has to expire. The lease of a live leader must not, on a machine that stands still for some seconds.
    const how = ["--lease", "--ttl", "10000"];
    return { url: `file:${path}`, how, hold: (key_) => hf.lease(key(key_)), close: () => hf.close() };
  }
  const place = await open(name === "pgbouncer" ? "postgres" : name);
  const url = new URL(name === "pgbouncer" ? serverUrl("pgbouncer") : place.url);
  url.pathname = new URL(place.url).pathname;
  return { url: url.href, how: [], hold: (key_) => place.hf.hold(key(key_)), close: place.close };
}

describe.each(Object.keys(followPlaces) as (keyof typeof followPlaces)[])("--follow on %s", (name) => {
  const reason = followPlaces[name].needs
    .map((server) => unavailable(server))
    .find((why) => why !== undefined);
  let place: FollowPlace;
  beforeEach(({ skip }) => skip(reason !== undefined, reason));
  beforeAll(async () => {
    if (reason === undefined) place = await followPlace(name);
  });
  afterAll(() => place?.close());

  /** One that runs until the file is there, and one that follows it. */
  async function two(lock: string, script: string) {
    const go = join(folder, `${name}-${lock}`);
    const args = ["--lock", lock, "--follow", ...place.how];
    const waiting = `echo $$; while [ ! -e ${go} ]; do sleep 0.1; done; ${script}`;
    const leader = exec(place.url, args, waiting);
    const [pid = 0] = await pids(leader, 1);
    const follower = exec(place.url, args, "echo ran");
    await said(follower, "waiting until it has ended");
    return { leader, pid, follower, go: () => writeFileSync(go, "") };
  }

  test("ends as the command did that it followed", async () => {
    for (const code of [0, 3]) {
      const { leader, follower, go } = await two(`ends-${code}`, `exit ${code}`);
      go();
      expect((await leader.done).code).toBe(code);
      const { code: its, out, err } = await follower.done;
      expect({ code: its, out }, err).toEqual({ code, out: "" });
      if (code === 3)
        expect(err).toMatch(
          /^holdfast: ends-3: `sh -c .*` on \S+ \(process \d+\), which this one followed, failed with exit code 3\. /m,
        );
      // Who comes later runs it.
      const later = await exec(place.url, ["--lock", `ends-${code}`, "--follow", ...place.how], "echo ran")
        .done;
      expect({ code: later.code, out: later.out }, later.err).toEqual({ code: 0, out: "ran\n" });
    }
  });

  test("fails if whoever it followed was killed", async () => {
    const { leader, pid, follower } = await two("killed", "exit 0");
    try {
      leader.child.kill("SIGKILL");
      const { code, out, err } = await follower.done;
      expect({ code, out }, err).toEqual({ code: 70, out: "" });
      expect(err).toMatch(/^holdfast: killed: .* was cut off: it lost the lock, or was killed\. /m);
    } finally {
      // The watchdog may have ended it already.
      if (isThere(pid)) process.kill(pid, "SIGKILL");
    }
  });

  test("runs the command if whoever had the lock ran none", async () => {
    const held = await place.hold("maintenance");
    const follower = exec(place.url, ["--lock", "maintenance", "--follow", ...place.how], "echo ran");
    await said(follower, "waiting until it has ended");
    await held[Symbol.asyncDispose]();
    expect(await follower.done).toMatchObject({ code: 0, out: "ran\n" });
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
      // Its watchdog ends the command.
      await eventually(() => !isThere(orphan));
    } finally {
      if (isThere(orphan)) process.kill(orphan, "SIGKILL");
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

  test("without tables nobody knows how it went, and whoever follows runs the command", async () => {
    const bare = await createDatabase("postgres");
    try {
      const go = join(folder, "bare-go");
      const args = ["--lock", "a:1", "--follow"];
      const leader = exec(bare.url, args, `echo in; while [ ! -e ${go} ]; do sleep 0.1; done; exit 5`);
      await said(leader, "in\n");
      const follower = exec(bare.url, args, "echo ran");
      await said(follower, "waiting until it has ended");
      writeFileSync(go, "");
      expect((await leader.done).code).toBe(5);
      const { code, out, err } = await follower.done;
      expect({ code, out }, err).toEqual({ code: 0, out: "ran\n" });
      expect(err).toContain("is not known, without the table of runs (holdfast migrate makes it)");
    } finally {
      await bare.drop();
    }
  });

  test("if holdfast is killed, its command ends with all that it has started; with --keep-going it goes on", async () => {
    const apart = process.platform === "linux" ? "setsid" : "";
    const deaf = `trap '' TERM; sleep 600 & echo $$; echo $!; ${apart} sleep 600 & echo $!; wait; sleep 600`;
    const [ends, stays] = [
      exec(place.url, ["--lock", "dog:1", "--grace", "1000"], deaf),
      exec(place.url, ["--lock", "dog:2", "--keep-going"], "echo $$; exec sleep 600"),
    ];
    const ended = await pids(ends, 3);
    const [stayed = 0] = await pids(stays, 1);
    for (const { child } of [ends, stays]) child.kill("SIGKILL");
    await eventually(() => !ended.some(isThere));
    expect(isThere(stayed)).toBe(true);
    process.kill(stayed, "SIGKILL");
  });

  test("if holdfast is killed while it starts its command, the command ends all the same", async () => {
    const early = "kill -KILL $PPID; sleep 600 & echo $$; echo $!; wait";
    const running = [1, 2, 3, 4].map((n) =>
      exec(place.url, ["--lock", `early:${n}`, "--grace", "1000"], early),
    );
    // Its output ends with the last process that has it open. A command may be ended before it has printed a number.
    const ended = await Promise.all(running.map(({ done }) => done));
    const started = ended.flatMap(({ out }) => (out.match(/^\d+$/gm) ?? []).map(Number));
    expect(started.length).toBeGreaterThan(0);
    await eventually(() => !started.some(isThere));
  });

  // A shell dies of SIGTERM at once. The program that it runs needs a while to stop, and is inside until then.
  test("a command that a signal ended has the lock until what it started has ended", async () => {
    const end = async (name: string, signal: (running: Running, shell: number) => void) => {
      const go = join(folder, `${name}-go`);
      const slow = `trap '' TERM; echo deaf; while [ ! -e ${go} ]; do sleep 0.1; done`;
      const running = exec(place.url, ["--lock", name], `(${slow}) & echo $$; echo $!; wait`);
      const [shell = 0, program = 0] = await pids(running, 2);
      // The shell prints the program's number before the program has run a line.
      await eventually(() => running.out().includes("deaf"));
      try {
        signal(running, shell);
        await said(
          running,
          `sh was ended by a signal; ${name} is held until the processes it started have ended.`,
        );
        expect(isThere(program)).toBe(true);
        expect(await place.hf.tryLock(key(name), async () => {})).toEqual({ acquired: false });
        writeFileSync(go, "");
        const { code, err } = await running.done;
        expect(isThere(program), err).toBe(false);
        expect(await place.hf.tryLock(key(name), async () => 1)).toEqual({ acquired: true, value: 1 });
        return code;
      } finally {
        if (isThere(program)) process.kill(program, "SIGKILL");
      }
    };
    const codes = [
      end("asked", ({ child }) => child.kill("SIGTERM")),
      end("killed", (_, shell) => process.kill(shell, "SIGKILL")),
    ];
    expect(await Promise.all(codes)).toEqual([143, 137]);
    // By itself it may leave something behind on purpose.
    const left = exec(place.url, ["--lock", "left"], "sleep 600 > /dev/null 2>&1 & echo $!");
    const { code, out, err } = await left.done;
    process.kill(Number(out), "SIGKILL");
    expect(code, err).toBe(0);
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
      ["--lock", "export:7", "--lease", "--ttl", "6000"],
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
    await eventually(() => !isThere(orphan));
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
  expect(busy.err).toContain(`:${first.child.pid} (holdfast exec: `);
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

/** On SQLite the lease is all there is: nothing else keeps others out once it has run out. */
describe("a lease that runs out", () => {
  let path: string;
  let hf: Holdfast<unknown>;
  beforeAll(async () => {
    path = join(folder, "leases.db");
    hf = holdfast(fromNodeSqlite(() => new DatabaseSync(path)));
    await hf.migrate();
  });
  afterAll(() => hf.close());

  const leased = async (name: string, ttl: number, script: string) => {
    const options = ["--lock", name, "--lease", "--ttl", String(ttl), "--grace", "3600000"];
    const running = exec(`file:${path}`, options, script);
    const [pid = 0] = await pids(running, 1);
    return { running, pid };
  };

  test("has ended the command by then, however long it may take to end", async () => {
    const { running, pid } = await leased("a", 3000, "trap '' TERM; echo $$; while :; do sleep 0.1; done");
    using writer = new DatabaseSync(path);
    writer.exec("PRAGMA busy_timeout = 10000");
    // It cannot be renewed.
    writer.exec("BEGIN IMMEDIATE");
    const { code, err } = await running.done;
    writer.exec("ROLLBACK");
    expect(code, err).toBe(70);
    expect(err).toMatch(/^holdfast: The lease a [^\n]*not renewed in time[^\n]*Ending the command\.$/m);
    expect(isThere(pid)).toBe(false);
  });

  test("while holdfast is stopped leaves the command running; once holdfast goes on, it ends the command", async () => {
    const { running, pid } = await leased("b", 4000, "echo $$; exec sleep 600");
    running.child.kill("SIGSTOP");
    const next = await hf.lease(key("b"), { wait: 60_000 });
    expect(isThere(pid)).toBe(true);
    await next.release();
    running.child.kill("SIGCONT");
    const { code, err } = await running.done;
    expect(code, err).toBe(70);
    expect(isThere(pid)).toBe(false);
  });
});

/** One key, taken in every way there is, by many at once, some of whom are killed or stopped: never two. */
describe("one key", () => {
  /**
   * Arguments: the file, the log, the way in, seconds. The system frees the file when the last process that has it open has
   * ended: whoever finds it taken is not alone. Only the shell has it open, whose end is waited for: of several processes that
   * are killed at once, one may end a fifth of a second after the others on a busy machine, and the next one would find the
   * file taken. Times are seconds of the machine's monotonic clock.
   */
  const inside = `
    note() { read -r at rest < /proc/uptime; echo "$1 $way, pid $$, at $at$2" >> "$log"; }
    file=$1 log=$2 way=$3
    exec 9>> "$file"
    me="$way, pid $$"
    if flock -n 9; then echo "$me" >> "$file"; note in; else note both ", with: $(tail -n 1 "$file")"; echo "$me" >> "$file"; fi
    echo $$
    sleep "$4" 9>&-
    note out`;

  function placesOf(name: string) {
    const [file, log] = [join(folder, `${name}.lock`), join(folder, `${name}.log`)];
    writeFileSync(log, "");
    return {
      args: (way: string, seconds: number) => ["-c", inside, "sh", file, log, way, String(seconds)],
      lines: () => readFileSync(log, "utf8").split("\n"),
    };
  }

  /** Whether there was somebody to get it. */
  function signal(pid: number, name: NodeJS.Signals): boolean {
    try {
      return process.kill(pid, name);
    } catch {
      return false;
    }
  }

  test("two at once are found, and named", async () => {
    const { args, lines } = placesOf("unlocked");
    const first = spawn("sh", args("first", 600), { detached: true, stdio: "ignore" });
    try {
      await eventually(() => lines().some((line) => line.startsWith("in first, ")));
      await new Promise((resolve) =>
        spawn("sh", args("second", 0), { stdio: "ignore" }).once("close", resolve),
      );
      expect(lines().filter((line) => line.startsWith("both "))).toEqual([
        expect.stringMatching(
          new RegExp(`^both second, pid \\d+, at [\\d.]+, with: first, pid ${first.pid}$`),
        ),
      ]);
    } finally {
      signal(-(first.pid as number), "SIGKILL");
    }
  });

  describe.each(["postgres", "mysql", "mariadb"] as const)("on %s", (server) => {
    const reason = unavailable(server);
    beforeEach(({ skip }) => skip(reason !== undefined, reason));

    test("is one at a time, whatever the way", { timeout: 1_200_000 }, async ({ skip }) => {
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
      const { args, lines } = placesOf(server);
      const alone = async (way: string) => {
        const code = await new Promise<number | null>((resolve) =>
          spawn("sh", args(way, 0.1), { stdio: "ignore" }).once("close", resolve),
        );
        expect(code).toBe(0);
      };
      const ttl = 8000;
      const long = process.env["HOLDFAST_LONG"] !== undefined;
      /** False: its command had ended. */
      const kill = async (running: Running, group: number): Promise<boolean> => {
        running.child.kill("SIGSTOP");
        const there = signal(-group, "SIGKILL");
        await eventually(() => !isThere(group));
        running.child.kill("SIGKILL");
        await running.done;
        return there;
      };
      /** The command, or holdfast alone while the command goes on; for longer than the lease lasts, in the long form. */
      const stall = async (running: Running, group: number, round: number): Promise<void> => {
        const send = (what: NodeJS.Signals) =>
          round % 2 === 0 ? signal(-group, what) : running.child.kill(what);
        if (!send("SIGSTOP")) return;
        await sleep(long && round % 4 < 2 ? ttl + 1000 : 300);
        send("SIGCONT");
      };
      const ways = urls.flatMap((url, i) =>
        [[], ["--lease", "--ttl", String(ttl)]].flatMap((how) =>
          [[], ["--wait", "300000"]].map((patience) => {
            const options = [...how, ...patience];
            return { url, options, label: ["exec", ...options, ...(i > 0 ? ["pooled"] : [])].join(" ") };
          }),
        ),
      );
      const rounds = long ? 20 : 3;
      let [entered, killed, stalled] = [0, 0, 0];
      try {
        for (let round = 0; round < rounds; round++) {
          const running = ways.map(({ url, options, label }) => {
            const started = start([
              "exec",
              "--url",
              url,
              "--lock",
              name,
              ...options,
              "--",
              "sh",
              ...args(label, 0.2),
            ]);
            begun.push(started);
            return started;
          });
          entered += running.length;
          await Promise.all([
            ...running.map(async (each, i) => {
              const fate = (i + 2 * round) % 3;
              if (fate < 2) {
                const [group = 0] = await pids(each, 1, 600_000);
                // It may have ended.
                if (isThere(group) && fate === 0) {
                  if (await kill(each, group)) killed++;
                  return;
                }
                if (isThere(group)) {
                  stalled++;
                  await stall(each, group, round);
                }
              }
              const { code, err } = await each.done;
              // Stopped for longer than its lease lasts, holdfast has lost it, and ends the command.
              if (!(long && fate === 1 && code === 70)) expect(code, err).toBe(0);
            }),
            ...hfs.map(async (hf, i) => {
              const way = `transaction${i > 0 ? " pooled" : ""}`;
              for (let n = 0; n < 3; n++)
                await hf.transaction({ lock, wait: 600_000, deadline: 900_000 }, async () => alone(way));
            }),
            (async () => {
              for (let n = 0; n < 3; n++) {
                await using held = await place.hf.hold(lock, { wait: 600_000 });
                await alone("hold");
                expect(held.signal.aborted).toBe(false);
              }
            })(),
          ]);
          entered += hfs.length * 3 + 3;
        }
        const log = lines();
        expect(
          log.filter((line) => line.startsWith("both ")),
          log.join("\n"),
        ).toEqual([]);
        expect(log.filter((line) => line.startsWith("in "))).toHaveLength(entered);
        expect(killed).toBeGreaterThan(0);
        expect(stalled).toBeGreaterThan(0);
      } finally {
        for (const hf of hfs.slice(1)) await hf.close();
        for (const pool of pools) await pool.end();
        await place.close();
      }
    });
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
