/** `holdfast exec` and `holdfast hold`: processes that start at once, are killed, and lose their connections. */
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { type Holdfast, holdfast } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { createPool } from "mysql2/promise";
import { Pool } from "pg";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type Running, command, start } from "./harness/command.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
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

const exec = (url: string, args: readonly string[], script: string): Running => {
  const running = start(["exec", "--url", url, ...args, "--", "sh", "-c", script]);
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

async function open(server: "postgres" | "mysql" | "mariadb"): Promise<Place> {
  const database: TestDatabase = await createDatabase(server);
  if (server === "postgres") {
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

test("behind PgBouncer it is a lease, and says so", async ({ skip }) => {
  const reason = unavailable("pgbouncer");
  skip(reason !== undefined, reason);
  const database = await createDatabase("pgbouncer");
  const pool = new Pool({ connectionString: database.url });
  const hf = holdfast(fromPg(pool));
  try {
    await hf.migrate();
    const { code, out, err } = await exec(database.url, ["--lock", "a:1"], "echo $HOLDFAST_FENCE").done;
    expect(code, err).toBe(0);
    expect(out).toMatch(/^\d+\n$/);
    expect(err).toContain("a lease, and not a lock of a session: a pooler in transaction mode");
  } finally {
    await hf.close();
    await pool.end();
    await database.drop();
  }
});

test("on SQLite it is a lease too, and one at a time", async () => {
  const path = join(folder, "app.db");
  const hf = holdfast(fromNodeSqlite(() => new DatabaseSync(path)));
  await hf.migrate();
  await hf.close();
  const go = join(folder, "sqlite-go");
  const first = exec(`file:${path}`, ["--lock", "a:1"], `echo $$; while [ ! -e ${go} ]; do sleep 0.1; done`);
  await pids(first, 1);
  const busy = await exec(`file:${path}`, ["--lock", "a:1", "--wait", "100"], "echo no").done;
  expect(busy).toMatchObject({ code: 75, out: "" });
  expect(busy.err).toContain(`:${first.child.pid} (holding, `);
  writeFileSync(go, "");
  const { code, err } = await first.done;
  expect(code, err).toBe(0);
  expect(err).toContain("a lease, and not a lock of a session");
  expect(existsSync(path)).toBe(true);
  // Somebody else writes to the file: nobody is known to have the key, so it is not skipped either.
  using writer = new DatabaseSync(path);
  writer.exec("BEGIN IMMEDIATE");
  for (const how of [["--wait", "100"], ["--skip"]]) {
    const refused = await exec(`file:${path}`, ["--lock", "b:1", ...how], "echo no").done;
    expect(refused).toMatchObject({ code: 75, out: "" });
    expect(refused.err).toContain("somebody else writes to the file");
  }
  const patient = exec(`file:${path}`, ["--lock", "b:1"], "echo yes");
  writer.exec("ROLLBACK");
  expect(await patient.done).toMatchObject({ code: 0, out: "yes\n" });
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
