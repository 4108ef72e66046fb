/** What is different about InnoDB, and must not show in quotas, stock, queues and schedules on MySQL and MariaDB. */
import { type Holdfast, LockTimeoutError, type Transaction, holdfast } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { queue } from "holdfast/queue";
import { quota, subjects } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { type Pool, type PoolConnection, type RowDataPacket, createPool } from "mysql2/promise";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { startWorker } from "./harness/processes.ts";
import { startProxy } from "./harness/proxy.ts";
import { eventually } from "./harness/wait.ts";
import { type StuckArg, hourMs } from "./workers/queue-stuck.ts";

const servers = { mariadb: "MariaDB", mysql: "MySQL" } as const;

describe.each(["mariadb", "mysql"] as const)("%s", (server) => {
  let database: TestDatabase;
  let pool: Pool;
  let hf: Holdfast<PoolConnection>;
  const why = unavailable(server);

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = createPool({ uri: database.url, connectionLimit: 12 });
    hf = holdfast(fromMysql2(pool));
    await hf.migrate();
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    if (why !== undefined) return;
    await hf.close();
    await pool.end();
    await database.drop();
  });

  let made = 0;
  const named = () => `p${++made}`;

  /** Runs a body while a transaction of somebody else's, which has done something, is open. */
  async function during(
    hold: (tx: Transaction<PoolConnection>) => Promise<unknown>,
    body: () => Promise<void>,
  ): Promise<void> {
    await hf.transaction(async (tx) => {
      await hold(tx);
      await hf.outside(body);
    });
  }

  test("names differ by case, accents and blanks at their end", async () => {
    const name = named();
    const of = quota(hf, { name, limit: 1 });
    const all = ["ann", "ANN", "ann ", "\u00e4nn", "a\u0308nn", "ann\t", "😀", " ann"];
    for (const subject of all) expect(await of.consume(subject)).toMatchObject({ used: 1 });
    for (const subject of all) expect((await of.tryConsume(subject)).granted).toBe(false);
    const found = (await subjects(hf, name)).map(({ subject }) => subject);
    const byBytes = (a: string, b: string) => Buffer.compare(Buffer.from(a), Buffer.from(b));
    expect(found).toEqual(all.toSorted(byBytes));

    const shop = stock<{ source: string }>(hf, { name });
    await shop.apply(
      all.map((sku) => ({ sku, quantity: 1 })),
      { source: "Web " },
    );
    expect((await shop.levels()).map(({ sku }) => sku)).toEqual(all.toSorted(byBytes));
    expect((await shop.history({ source: "web" })).movements).toEqual([]);
    expect((await shop.history({ source: "Web" })).movements).toEqual([]);
    expect((await shop.history({ source: "Web " })).movements).toHaveLength(all.length);
  });

  test("what a connection's character set does not have is kept all the same", async () => {
    const name = named();
    const narrow = createPool({ uri: database.url, connectionLimit: 2, charset: "latin1_swedish_ci" });
    const theirs = holdfast(fromMysql2(narrow));
    try {
      const metadata = { note: "日本 \\ ' \" 😀" };
      await quota(theirs, { name, limit: 5 }).consume("日本", 1, { id: "漢字", metadata });
      await quota(theirs, { name, limit: 5 }).consume("??", 2);
      const ours = quota(hf, { name, limit: 5 });
      expect(await ours.peek("日本")).toMatchObject({ used: 1 });
      for (const of of [ours, quota(theirs, { name, limit: 5 })])
        expect((await of.history("日本")).entries).toMatchObject([{ id: "漢字", metadata }]);
      const { id } = await queue(theirs, name).enqueue({ text: "日本" }, { group: "漢字" });
      expect(await queue(theirs, name).inspect(id)).toMatchObject({
        payload: { text: "日本" },
        group: "漢字",
      });
    } finally {
      await theirs.close();
      await narrow.end();
    }
  });

  test("a call that fails half-way in a transaction leaves nothing, and the transaction goes on", async () => {
    const of = quota(hf, { name: named(), limit: 10 });
    await of.consume("ann", 1);
    await pool.query(`CREATE TRIGGER refuse BEFORE INSERT ON holdfast_quota_line FOR EACH ROW
      BEGIN IF NEW.id = 'refused' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'refused'; END IF; END`);
    try {
      await hf.transaction(async (tx) => {
        await of.consume("ann", 2, { tx });
        await expect(of.consume("ann", 4, { tx, id: "refused" })).rejects.toThrow("refused");
      });
    } finally {
      await pool.query("DROP TRIGGER refuse");
    }
    expect(await of.peek("ann")).toMatchObject({ used: 3 });
    expect(await of.reconcile("ann")).toMatchObject({ ok: true });
  });

  test("a transaction keeps nobody from what is next to its rows", async () => {
    const name = named();
    const [of, shop] = [quota(hf, { name, limit: 10 }), stock(hf, { name })];
    const [b, e] = [queue(hf, name), queue(hf, `${name}e`)];
    await b.counts();
    await e.counts();
    for (const each of ["a", "b", "c"]) {
      await of.consume(each);
      await shop.increase(each, 5);
    }
    await during(
      async (tx) => {
        await of.consume("b", 1, { tx });
        await of.consume("new", 1, { tx });
        await shop.decrease("b", 1, { tx });
        await b.enqueue(1, { tx, key: "b", group: "b" });
      },
      async () => {
        const wait = 1000;
        for (const each of ["a", "c", "d"]) await of.consume(each, 1, { wait });
        await Promise.all(["a", "c", "d", "e"].map((each) => of.consume(each, 1, { wait })));
        await quota(hf, { name: `${name}e`, limit: 1 }).consume("b", 1, { wait });
        await shop.apply(
          ["a", "c", "d"].map((sku) => ({ sku, quantity: 1 })),
          { wait },
        );
        // Numbers were taken, and are not waited for.
        for (const each of ["a", "c"]) await b.enqueue(each, { key: each, group: each, wait });
        await e.enqueue(1, { key: "b", group: "b", wait });
        await Promise.all(Array.from({ length: 5 }, () => b.enqueue(0, { wait })));
      },
    );
    expect(await b.counts()).toMatchObject({ waiting: 8 });
  });

  // The server waits whole seconds, here a minute: they have to be sent apart.
  test("calls that were sent together with one that has to wait do not wait", async () => {
    const name = named();
    const patient = holdfast(fromMysql2(pool), { wait: 60_000 });
    const [of, shop] = [quota(patient, { name, limit: 10 }), stock(patient, { name })];
    for (const each of ["held", "a", "b"]) {
      await of.consume(each);
      await shop.increase(each, 5);
    }
    let held: Promise<unknown>[] = [];
    await during(
      async (tx) => {
        await quota(hf, { name, limit: 10 }).consume("held", 1, { tx });
        await stock(hf, { name }).decrease("held", 1, { tx });
      },
      async () => {
        // What comes while these are under way goes together.
        const first = [of.consume("a"), shop.decrease("a", 1)];
        held = [of.consume("held"), shop.decrease("held", 1)];
        await Promise.all([...first, ...["a", "b", "new"].map((each) => of.consume(each))]);
        await Promise.all(["a", "b"].map((each) => shop.decrease(each, 1)));
        await shop.increase("new", 1);
      },
    );
    await Promise.all(held);
    for (const [subject, used] of Object.entries({ held: 3, a: 3, b: 2, new: 1 }))
      expect(await of.peek(subject)).toMatchObject({ used });
    expect((await shop.levels()).map(({ sku, onHand }) => [sku, onHand])).toEqual([
      ["a", 3],
      ["b", 4],
      ["held", 3],
      ["new", 1],
    ]);
    await patient.close();
  });

  test("workers that have some jobs in transactions do not stop others from the rest", async () => {
    const q = queue<number>(hf, named());
    await q.enqueueMany(
      Array.from({ length: 12 }, (_, n) => ({ payload: n, ...(n % 2 === 1 && { group: `g${n % 3}` }) })),
    );
    const seen: number[] = [];
    const all = Promise.withResolvers<void>();
    const two = Promise.withResolvers<void>();
    let inside = 0;
    const workers = [1, 2].map(() =>
      q.work(
        async ({ payload }) => {
          // The first two end only when both are under way.
          if (++inside >= 2) two.resolve();
          await two.promise;
          seen.push(payload);
          if (seen.length === 12) all.resolve();
        },
        { concurrency: 1, batch: 1, transactional: true, pollMs: 50, onTrouble: all.reject },
      ),
    );
    await all.promise;
    await Promise.all(workers.map((worker) => worker.stop()));
    expect(seen.toSorted((a, b) => a - b)).toEqual(Array.from({ length: 12 }, (_, n) => n));
  });

  test("payloads that are more than the server takes at once go in several statements", async () => {
    const q = queue<{ n: number; text: string }>(hf, named());
    const text = "é".repeat(500_000);
    await q.enqueueMany(Array.from({ length: 12 }, (_, n) => ({ payload: { n, text } })));
    const seen: number[] = [];
    const all = Promise.withResolvers<void>();
    const worker = q.work(
      ({ payload }) => {
        expect(payload.text).toBe(text);
        if (seen.push(payload.n) === 12) all.resolve();
      },
      { concurrency: 12, pollMs: 50, onTrouble: all.reject },
    );
    await all.promise;
    await worker.stop();
    expect(seen.toSorted((a, b) => a - b)).toEqual(Array.from({ length: 12 }, (_, n) => n));
  });

  /** What was sent on these connections; what a procedure does is not counted. */
  async function messages(from: Pool, size: number, work: () => Promise<unknown>): Promise<number> {
    const count = async () => {
      const all = await Promise.all(Array.from({ length: size }, () => from.getConnection()));
      let sum = 0;
      for (const each of all) {
        const [[row]] = await each.query<RowDataPacket[]>("SHOW SESSION STATUS LIKE 'Questions'");
        sum += Number(row?.["Value"]);
        each.release();
      }
      return sum;
    };
    const before = await count();
    await work();
    return (await count()) - before - size;
  }

  test("what finds its rows and room there is read and written with two messages", async () => {
    const alone = createPool({ uri: database.url, connectionLimit: 1 });
    const theirs = holdfast(fromMysql2(alone));
    try {
      const name = named();
      const of = quota(theirs, { name, limit: 1000, per: "hour" });
      const shop = stock(theirs, { name });
      const use = () => of.consume("ann", 1, { metadata: { note: "日本 \\ ' \" 😀" } });
      const sell = () => shop.apply([{ sku: "pen", quantity: -1 }]);
      await shop.apply([{ sku: "pen", quantity: 1000 }]);
      await use();
      await sell();
      expect([await messages(alone, 1, use), await messages(alone, 1, sell)]).toEqual([2, 2]);
      const many = () => Promise.all(Array.from({ length: 50 }, use));
      // The first of them goes at once.
      expect(await messages(alone, 1, many)).toBeLessThanOrEqual(4);
      expect(await of.peek("ann")).toMatchObject({ used: 52 });
      // Refused without a lock.
      const none = quota(theirs, { name: named(), limit: 1 });
      await none.consume("ann");
      expect(await messages(alone, 1, () => none.tryConsume("ann"))).toBe(1);
      const { entries } = await of.history("ann");
      expect(entries.at(-1)).toMatchObject({ metadata: { note: "日本 \\ ' \" 😀" } });
      expect(await of.reconcile("ann")).toMatchObject({ ok: true });
    } finally {
      await theirs.close();
      await alone.end();
    }
  });

  test("of calls that were sent together, only those that somebody was in the way of are locked first", async () => {
    const three = createPool({ uri: database.url, connectionLimit: 3 });
    const theirs = holdfast(fromMysql2(three));
    try {
      const name = named();
      const [of, ours] = [quota(theirs, { name, limit: 9 }), quota(hf, { name, limit: 9 })];
      for (const subject of ["ann", "bob", "cid"]) await of.consume(subject);
      let waiting: Promise<unknown> | undefined;
      await during(
        (tx) => ours.consume("ann", 1, { tx }),
        async () => {
          // The first goes at once, and the others together.
          const first = of.consume("cid");
          waiting = of.consume("ann");
          waiting.catch(() => {});
          await Promise.all([first, of.consume("bob")]);
        },
      );
      await waiting;
      expect(await messages(three, 3, () => of.consume("bob"))).toBe(2);
      expect(await ours.peek("ann")).toMatchObject({ used: 3 });
    } finally {
      await theirs.close();
      await three.end();
    }
  });

  test("who was slower decides again, and what somebody has is waited for", async () => {
    const name = named();
    const of = quota(hf, { name, limit: 60 });
    const shop = stock(hf, { name });
    await of.consume("ann");
    await shop.apply([{ sku: "pen", quantity: 60 }]);
    const others = holdfast(fromMysql2(pool));
    try {
      const [theirQuota, theirShop] = [quota(others, { name, limit: 60 }), stock(others, { name })];
      const granted = await Promise.all(
        Array.from(
          { length: 100 },
          async (_, i) => (await (i % 2 ? of : theirQuota).tryConsume("ann")).granted,
        ),
      );
      expect(granted.filter(Boolean).length).toBe(59);
      const sold = await Promise.allSettled(
        Array.from({ length: 100 }, (_, i) =>
          (i % 2 ? shop : theirShop).apply([{ sku: "pen", quantity: -1 }]),
        ),
      );
      expect(sold.filter(({ status }) => status === "fulfilled").length).toBe(60);
      expect(await of.reconcile("ann")).toMatchObject({ ok: true });
    } finally {
      await others.close();
    }
    const roomy = quota(hf, { name: named(), limit: 60 });
    await roomy.consume("bob");
    let waiting: Promise<unknown> | undefined;
    await during(
      (tx) => roomy.consume("bob", 1, { tx }),
      async () => {
        await expect(roomy.consume("bob", 1, { wait: 50 })).rejects.toThrow(LockTimeoutError);
        waiting = roomy.consume("bob");
        waiting.catch(() => {});
      },
    );
    expect(await waiting).toMatchObject({ used: 3 });
  });

  /** Runs something between the read of a call and what it writes. */
  async function inBetween(
    call: (through: Holdfast<PoolConnection>) => Promise<unknown>,
    work: () => Promise<unknown>,
  ): Promise<void> {
    const proxy = await startProxy({ port: Number(new URL(database.url).port) });
    const far = createPool({ uri: proxy.url(database.url), connectionLimit: 2 });
    const through = holdfast(fromMysql2(far));
    try {
      await through.capabilities();
      const held = Promise.withResolvers<void>();
      let once = true;
      proxy.cutWhen((direction, chunk) => {
        if (!once || direction !== "to-server" || !chunk.toString("latin1").includes("CALL holdfast_apply"))
          return "pass";
        once = false;
        held.resolve();
        return "hold";
      });
      const calling = call(through);
      await Promise.race([held.promise, calling.then(() => Promise.reject(new Error("it was not called")))]);
      await work();
      proxy.thaw();
      await calling;
    } finally {
      proxy.thaw();
      await through.close();
      await far.end();
      await proxy.close();
    }
  }

  test("what happens between the read and the call is seen by it, or left alone", async () => {
    const name = named();
    const of = quota(hf, { name, limit: 5 });
    const monthMs = 30 * 24 * hourMs;
    const rolled = async () => {
      const [[row]] = await pool.query<RowDataPacket[]>(
        "SELECT rolled FROM holdfast_quota_bucket WHERE quota = ? AND subject = 'ann'",
        [name],
      );
      return row?.["rolled"] as number | null;
    };
    for (let i = 0; i < 3; i++) await of.consume("ann");
    await pool.query(
      "UPDATE holdfast_quota_line l JOIN holdfast_quota_bucket b ON b.id = l.bucket SET l.at = l.at - ? WHERE b.quota = ?",
      [2000 * monthMs, name],
    );
    let kept: number | null = null;
    await inBetween(
      (through) => quota(through, { name, limit: 5 }).consume("ann"),
      async () => {
        await of.prune({ before: new Date(Date.now() - monthMs) });
        kept = await rolled();
      },
    );
    expect(kept).not.toBeNull();
    expect(await rolled()).toBe(kept);
    expect(await of.reconcile("ann")).toMatchObject({ ok: true });
    await inBetween(
      async (through) => {
        const { granted } = await quota(through, { name, limit: 5 }).tryConsume("ann");
        expect(granted).toBe(false);
      },
      () => of.consume("ann"),
    );
    const shop = stock(hf, { name });
    await shop.apply([{ sku: "pen", quantity: 1 }]);
    await inBetween(
      (through) =>
        expect(stock(through, { name }).apply([{ sku: "pen", quantity: -1 }])).rejects.toThrow(/pen/),
      () => shop.reserve([{ sku: "pen", quantity: 1 }]),
    );
    await expect(of.tryConsume("ann")).resolves.toMatchObject({ granted: false, used: 5 });
  });

  test("a call that is ended half-way leaves nothing, and the session as it was", async () => {
    // The second one is for whoever ends what is sent on the first.
    const alone = createPool({ uri: database.url, connectionLimit: 2 });
    const theirs = holdfast(fromMysql2(alone));
    const name = named();
    const of = quota(theirs, { name, limit: 60 });
    await of.consume("ann");
    await pool.query(
      "CREATE TRIGGER slowly BEFORE INSERT ON holdfast_quota_line FOR EACH ROW SET @slowly = SLEEP(IF(NEW.amount = 7, 20, 0))",
    );
    try {
      const sessions = () =>
        Promise.all(
          [1, 2].map(async () => {
            const [[row]] = await alone.query<RowDataPacket[]>(
              "SELECT CONNECTION_ID() AS id, @@autocommit AS auto, (SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = CONNECTION_ID()) AS open",
            );
            return row;
          }),
        ).then((all) => all.toSorted((a, b) => a?.["id"] - b?.["id"]));
      const before = await sessions();
      const abort = new AbortController();
      const calling = of.consume("ann", 7, { signal: abort.signal });
      calling.catch(() => {});
      await eventually(async () => {
        const [rows] = await pool.query<RowDataPacket[]>(
          "SELECT COUNT(*) AS n FROM information_schema.processlist WHERE id IN (?) AND state = 'User sleep'",
          [before.map((each) => each?.["id"])],
        );
        return Number(rows[0]?.["n"]) === 1;
      });
      abort.abort();
      await expect(calling).rejects.toThrow();
      expect(await sessions()).toEqual(before);
      expect(await of.peek("ann")).toMatchObject({ used: 1 });
      expect(await of.consume("ann", 2)).toMatchObject({ used: 3 });
      expect(await quota(hf, { name, limit: 60 }).peek("ann")).toMatchObject({ used: 3 });
    } finally {
      await pool.query("DROP TRIGGER slowly");
      await theirs.close();
      await alone.end();
    }
  });

  test.each([1, 0])("sessions are as they were, with autocommit %i", async (autocommit) => {
    const alone = createPool({ uri: database.url, connectionLimit: 1 });
    const theirs = holdfast(fromMysql2(alone));
    const settings = async () => {
      const isolation = server === "mysql" ? "@@transaction_isolation" : "@@tx_isolation";
      const [[row]] = await alone.query<RowDataPacket[]>(
        `SELECT @@innodb_lock_wait_timeout AS wait, @@autocommit AS auto, ${isolation} AS level, CONNECTION_ID() AS id`,
      );
      return row;
    };
    try {
      await alone.query(`SET SESSION innodb_lock_wait_timeout = 17, SESSION autocommit = ${autocommit}`);
      const before = await settings();
      expect(before).toMatchObject({ wait: 17, auto: autocommit });
      const name = named();
      const of = quota(theirs, { name, limit: 1 });
      const roomy = quota(theirs, { name: named(), limit: 9 });
      for (const used of [1, 2, 3]) {
        expect(await roomy.consume("ann")).toMatchObject({ used });
        expect(await quota(hf, { name: roomy.name, limit: 9 }).peek("ann")).toMatchObject({ used });
        expect(await settings()).toEqual(before);
      }
      await of.consume("ann", 1, { id: "first" });
      // Its id is taken, which is met when it is written.
      expect(await of.consume("ann", 1, { id: "first" })).toMatchObject({ used: 1 });
      await expect(of.consume("ann")).rejects.toThrow();
      const ours = quota(hf, { name, limit: 1 });
      expect(await ours.peek("ann")).toMatchObject({ used: 1 });
      expect(await settings()).toEqual(before);
      await during(
        (tx) => ours.consume("bob", 1, { tx }),
        async () => {
          await expect(of.consume("bob", 1, { wait: 100 })).rejects.toThrow(LockTimeoutError);
          const abort = new AbortController();
          const calling = of.consume("bob", 1, { signal: abort.signal, wait: 1000 });
          setTimeout(() => abort.abort(), 100);
          await expect(calling).rejects.toThrow();
        },
      );
      expect(await settings()).toEqual(before);
      await theirs.transaction(async (tx) => {
        await expect(of.consume("ann", 1, { tx })).rejects.toThrow();
      });
      expect(await settings()).toEqual(before);
    } finally {
      await theirs.close();
      await alone.end();
    }
  });

  test.each([`mysql2 on ${servers[server]}`, `Prisma on ${servers[server]}`])(
    "jobs of a process that is killed are there for others at once, not when its time is over: %s",
    async (backend) => {
      const name = named();
      const jobs = queue<number>(hf, name);
      await jobs.enqueue(1);
      const victim = startWorker(new URL("./workers/queue-stuck.ts", import.meta.url), {
        backend,
        url: database.url,
        queue: name,
      } satisfies StuckArg);
      await victim.message("begun");
      // Its session has a lock, a moment after it began.
      await eventually(async () => {
        const [rows] = await pool.query<RowDataPacket[]>(
          "SELECT COUNT(*) AS n FROM holdfast_queue_worker w JOIN holdfast_queue q ON q.id = w.queue WHERE q.name = ? AND w.`lock` IS NOT NULL",
          [name],
        );
        return Number(rows[0]?.["n"]) === 1;
      });
      const done: number[] = [];
      const heir = jobs.work(({ attempt }) => void done.push(attempt), { ttlMs: hourMs });
      try {
        expect(await jobs.counts()).toMatchObject({ running: 1 });
        victim.sigkill();
        await victim.exited;
        await eventually(() => done.length === 1);
        expect(done).toEqual([2]);
      } finally {
        await heir.stop();
      }
    },
  );
});
