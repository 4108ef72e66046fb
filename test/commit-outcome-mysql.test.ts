/** COMMITs whose answer was lost, on MySQL and MariaDB: transactions with a lock write down that they are committed. */
import { CommitUnknownError, type Holdfast, type HoldfastError, holdfast, key, sql } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { execute } from "holdfast/testing";
import {
  type Pool,
  type PoolConnection,
  type RowDataPacket,
  createConnection,
  createPool,
} from "mysql2/promise";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { backendNamed, backends } from "./backends.ts";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { startMariadb } from "./harness/mariadb.ts";
import type { StartedServer } from "./harness/started-server.ts";
import { missing, placeFor } from "./harness/places.ts";
import { type Proxy, type Verdict, isCommit, startProxy } from "./harness/proxy.ts";
import { eventually } from "./harness/wait.ts";

type Site = ReturnType<typeof fromMysql2>;
type Pinned = Awaited<ReturnType<NonNullable<Site["connect"]>>>;
type Opening = Parameters<Site["engine"]["begin"]>[1];
type Begun = Parameters<Site["engine"]["end"]>[2];

/** What ends a transaction, whoever writes it: ours is the name of a procedure, some clients write it small. */
const ends = (chunk: Buffer) => {
  const text = chunk.toString("latin1");
  return isCommit(chunk) || /\bcommit\b/i.test(text) || text.includes("CALL holdfast_commit");
};

/** Once, at the first message to the server that is one of these. */
function once(proxy: Proxy, fate: Verdict, matches: (chunk: Buffer) => boolean): void {
  proxy.cutWhen((direction, chunk) => {
    if (direction !== "to-server" || !matches(chunk)) return "pass";
    proxy.cutWhen(undefined);
    return fate;
  });
}

describe.each(["mariadb", "mysql"] as const)("%s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let pool: Pool;
  let hf: Holdfast<PoolConnection>;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = createPool({ uri: database.url, connectionLimit: 10 });
    hf = holdfast(fromMysql2(pool));
    await hf.migrate();
    await pool.query("CREATE TABLE effect (n int NOT NULL) ENGINE=InnoDB");
  });

  beforeEach(async ({ skip }) => {
    skip(why !== undefined, why);
    await pool.query("DELETE FROM effect");
  });

  afterAll(async () => {
    if (why !== undefined) return;
    await hf.close();
    await pool.end();
    await database.drop();
  });

  const rows = async (statement: string) => (await pool.query<RowDataPacket[]>(statement))[0];
  const effects = async () => (await rows("SELECT n FROM effect ORDER BY n")).map(({ n }) => Number(n));

  async function away(
    run: (hf: Holdfast<PoolConnection>, proxy: Proxy) => Promise<unknown>,
    connectionLimit = 3,
  ): Promise<void> {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const remote = createPool({ uri: proxy.url(database.url), connectionLimit });
    const there = holdfast(fromMysql2(remote));
    try {
      await there.capabilities();
      await run(there, proxy);
    } finally {
      await there.close();
      await remote.end();
      await proxy.close();
    }
  }

  describe.each(["read committed", "repeatable read", "serializable"] as const)("%s", (isolation) => {
    test.each([
      ["the answer is lost: it was committed, and does not run again", "drop-answer", 1],
      ["COMMIT does not arrive: it was not, and runs again", "cut-before", 2],
    ] as const)("%s", async (_, fate, expected) => {
      await away(async (there, proxy) => {
        let runs = 0;
        once(proxy, fate, ends);
        const done = await there.transaction({ lock: key("cut"), isolation }, async (tx) => {
          runs++;
          await tx.client.query("INSERT INTO effect VALUES (1)");
          return "done";
        });
        expect([done, runs, proxy.cuts]).toEqual(["done", expected, 1]);
        expect(await effects()).toEqual([1]);
      });
    });
  });

  test("a session that has committed before is asked for its last one", async () => {
    await away(async (there, proxy) => {
      const add = (n: number) =>
        there.transaction({ lock: key("several") }, (tx) =>
          tx.client.query(`INSERT INTO effect VALUES (${n})`),
        );
      for (let n = 1; n <= 6; n++) {
        if (n > 2) once(proxy, n % 2 === 0 ? "drop-answer" : "cut-before", ends);
        await add(n);
      }
      expect(await effects()).toEqual([1, 2, 3, 4, 5, 6]);
    }, 1);
  });

  test("without a lock there is no record of it", async () => {
    await away(async (there, proxy) => {
      once(proxy, "drop-answer", ends);
      const running = there.transaction((tx) => tx.client.query("INSERT INTO effect VALUES (1)"));
      const error = await running.catch((thrown: unknown) => thrown);
      expect(error).toBeInstanceOf(CommitUnknownError);
      expect(String(error)).toContain("only a transaction with `lock` leaves a record");
    });
  });

  test("sessions have one row each, however many transactions they have", async () => {
    const alone = createPool({ uri: database.url, connectionLimit: 1 });
    const there = holdfast(fromMysql2(alone));
    await pool.query("DELETE FROM holdfast_committed");
    for (let i = 0; i < 5; i++) await there.transaction({ lock: key("row") }, async () => {});
    await there.transaction({ lock: key("row"), isolation: "repeatable read" }, async () => {});
    await there
      .transaction({ lock: key("row") }, () => Promise.reject(new Error("on purpose")))
      .catch(() => {});
    await there.transaction({ lock: key("row") }, async () => {});
    expect(await rows("SELECT last, undone FROM holdfast_committed")).toEqual([{ last: 8, undone: 0 }]);
    await there.close();
    await alone.end();
  });

  test("rows of sessions that are long gone are deleted, a few with each new one", async () => {
    await pool.query("DELETE FROM holdfast_committed");
    const old = Array.from({ length: 6 }, (_, i) => `('old ${i}', 1, 5)`).join();
    await pool.query(`INSERT INTO holdfast_committed (id, last, used) VALUES ${old}`);
    await pool.query(
      "INSERT INTO holdfast_committed (id, last, used) VALUES ('young', 1, FLOOR(UNIX_TIMESTAMP() / 3600) - 23)",
    );
    await eventually(async () => {
      const fresh = createPool({ uri: database.url, connectionLimit: 1 });
      const there = holdfast(fromMysql2(fresh));
      await there.transaction({ lock: key("new") }, async () => {});
      await there.close();
      await fresh.end();
      const [left] = await rows("SELECT count(*) AS n FROM holdfast_committed WHERE used = 5");
      expect(Number(left?.["n"])).toBe(0);
    });
    expect(await rows("SELECT last FROM holdfast_committed WHERE id = 'young'")).toHaveLength(1);
  });

  describe("what is told of a transaction that has not ended", () => {
    const site = () => {
      const { engine, connect } = fromMysql2(pool);
      const purpose = { use: "session", locks: [], wait: 1000 } as const;
      return {
        engine,
        connect: () => connect?.(purpose) as Promise<Pinned>,
        async open(
          connection: Pinned["connection"],
          isolation: Opening["isolation"],
          begun = false,
        ): Promise<Begun> {
          const grant = await engine.begin(connection, {
            begun,
            lockFirst: false,
            isolation,
            readOnly: false,
            deadlineMs: 5000,
            locks: [{ key: key("open"), mode: "exclusive" }],
            wait: 5000,
            names: ["open"],
            capabilities: await hf.capabilities(),
          });
          expect(grant.granted).toBe(true);
          await connection.query(sql`INSERT INTO effect VALUES (1)`);
          return grant.begun as Begun;
        },
      };
    };

    test("a call that commits, and comes after it was asked for, fails", async () => {
      const { engine, connect, open } = site();
      const [a, b] = [await connect(), await connect()];
      const begun = await open(a.connection, "read committed");
      const identity = begun.identity as string;
      expect(await engine.outcome?.(b.connection, identity)).toBe("aborted");
      expect(await engine.outcome?.(b.connection, identity)).toBe("aborted");
      await expect(engine.end(a.connection, "commit", begun)).rejects.toMatchObject({ errno: 1062 });
      await engine.end(a.connection, "rollback", begun);
      expect(await effects()).toEqual([]);
      // The session is as good as new.
      const next = await open(a.connection, "read committed");
      await engine.end(a.connection, "commit", next);
      expect(await engine.outcome?.(b.connection, next.identity as string)).toBe("committed");
      expect(await effects()).toEqual([1]);
      for (const each of [a, b]) await each.release();
    });

    test.each([
      ["COMMIT", "committed"],
      ["ROLLBACK", "aborted"],
    ] as const)("a COMMIT that the client writes is waited for (%s)", async (how, expected) => {
      const { engine, connect, open } = site();
      const [a, b] = [await connect(), await connect()];
      await a.connection.query(sql`START TRANSACTION`);
      const begun = await open(a.connection, "repeatable read", true);
      const identity = begun.identity as string;
      await engine.settle?.(a.connection, begun);
      expect(await engine.outcome?.(b.connection, identity)).toBe("in progress");
      await a.connection.query(sql.raw(how));
      expect(await engine.outcome?.(b.connection, identity)).toBe(expected);
      for (const each of [a, b]) await each.release();
    });

    test("another server says nothing of what it has not", async () => {
      const { engine, connect, open } = site();
      const [a, b] = [await connect(), await connect()];
      const begun = await open(a.connection, "read committed");
      const elsewhere = `${(begun.identity as string).split("/", 2).join("/")}/another:1:server`;
      expect(await engine.outcome?.(b.connection, elsewhere)).toBe("unknown");
      await engine.end(a.connection, "commit", begun);
      expect(await engine.outcome?.(b.connection, elsewhere)).toBe("committed");
      for (const each of [a, b]) await each.release();
    });
  });
});

const clients = backends.filter((each) => each.server === "mariadb" || each.server === "mysql");

describe.each(clients.map(({ name }) => name))("%s", (name) => {
  test("what was told once was done once", { timeout: 60_000 }, async ({ skip }) => {
    const backend = backendNamed(name);
    skip(missing(backend) !== undefined, missing(backend));
    const place = await placeFor(backend);
    const proxy = await startProxy({ port: Number(new URL(place.url).port) });
    const site = await backend.open(proxy.url(place.url));
    const hf = holdfast(site.database);
    try {
      await hf.migrate();
      await hf.transaction((tx) => tx.query(sql`CREATE TABLE effect (n int NOT NULL)`)).catch(() => {});
      for (const [n, fate] of (["drop-answer", "cut-before", "drop-answer"] as const).entries()) {
        await hf.transaction({ lock: key("client") }, async () => {});
        once(proxy, fate, ends);
        await hf.transaction({ lock: key("client") }, (tx) =>
          tx.query(sql`INSERT INTO effect VALUES (${n})`),
        );
      }
      expect(proxy.cuts).toBe(3);
      const found = await hf.transaction((tx) => tx.query(sql`SELECT n AS n FROM effect ORDER BY n`));
      expect(found.map((row) => Number(row.n))).toEqual([0, 1, 2]);
    } finally {
      await hf.close();
      await site.close().catch(() => {});
      await proxy.close();
      await place.drop();
    }
  });
});

/**
 * Keeps everybody on the server from committing. What it resolves to ends the first of this database who waits. The others go
 * on once that one has noticed: a session whose lock is granted before it looks commits all the same.
 */
async function blockCommits(url: string): Promise<(how: string) => Promise<void>> {
  const admin = await createConnection(url);
  for (const stage of ["START", "FLUSH", "BLOCK_DDL", "BLOCK_COMMIT"])
    await admin.query(`BACKUP STAGE ${stage}`);
  const waiting = async () => {
    const [found] = await admin.query<RowDataPacket[]>(
      "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND state LIKE '%backup lock%'",
    );
    return found.map(({ id }) => Number(id));
  };
  const endOne = async (how: string) => {
    let ended = 0;
    await eventually(async () => {
      [ended = 0] = await waiting();
      return ended > 0;
    });
    await admin.query(`${how} ${ended}`);
    await eventually(async () => !(await waiting()).includes(ended));
    await admin.query("BACKUP STAGE END");
  };
  return (how) => endOne(how).finally(() => admin.destroy());
}

describe("a COMMIT that somebody ends on the server is told in words of ours, and nothing is kept", () => {
  // Of its own: nobody can commit on it meanwhile.
  let own: StartedServer | undefined;
  let made = 0;
  beforeAll(async () => {
    if (unavailable("mariadb") === undefined) own = await startMariadb();
  });
  afterAll(() => own?.stop());

  const onMariadb = clients.filter(({ server }) => server === "mariadb").map(({ name }) => name);
  test.for(onMariadb)("%s", async (name, { skip }) => {
    const backend = backendNamed(name);
    skip(missing(backend) !== undefined, missing(backend));
    const url = new URL(own?.url as string);
    const admin = await createConnection(url.href);
    url.pathname = `/ended${++made}`;
    await admin.query(`CREATE DATABASE ended${made}`);
    await admin.end();
    const site = await backend.open(url.href);
    const hf = holdfast(site.database, { hazards: "off" });
    try {
      await hf.migrate();
      await execute(site, sql`CREATE TABLE effect (n int NOT NULL)`);
      const told: unknown[] = [];
      for (const how of ["KILL QUERY", "KILL CONNECTION"])
        for (const options of [{ lock: key("commit") }, {}]) {
          let ending: Promise<void> | undefined;
          const call = hf.transaction({ ...options, retry: false }, async (tx) => {
            await tx.query(sql`INSERT INTO effect VALUES (1)`);
            ending = (await blockCommits(url.href))(how);
          });
          told.push(await call.then(() => "committed").catch((error: unknown) => error));
          await ending;
        }
      expect(told.map((error) => (error as HoldfastError).code)).toEqual([
        "HF_DEADLINE",
        "HF_DEADLINE",
        "HF_CONNECTION_LOST",
        "HF_COMMIT_UNKNOWN",
      ]);
      expect((told[0] as Error).message).toMatch(/on somebody's request .*Nothing was kept/s);
      expect(await execute(site, sql`SELECT n FROM effect`)).toEqual([]);
    } finally {
      await hf.close();
      await site.close().catch(() => {});
    }
  });
});
