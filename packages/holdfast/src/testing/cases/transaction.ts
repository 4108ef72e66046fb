import { AsyncLocalStorage } from "node:async_hooks";
import { tracingChannel } from "node:diagnostics_channel";
import { DeadlineExceededError, UsageError } from "../../seam/errors.ts";
import { isUniqueViolation } from "../../seam/failure.ts";
import { key } from "../../seam/key.ts";
import { type Ground, execute } from "../ground.ts";
import { assert, nested, sql, suite, table } from "./support.ts";

async function count({ hf }: Ground, name: string): Promise<number> {
  const rows = await hf.transaction((tx) => tx.query(sql`SELECT count(*) AS n FROM ${sql.id(name)}`));
  return Number(rows[0]?.n);
}

const insert = (name: string, k = "a") => sql`INSERT INTO ${sql.id(name)} (k, n) VALUES (${k}, ${1})`;

export const transactionCases = suite("transaction", {
  "keeps what the body wrote, and returns what it returned": async (ground) => {
    const name = await table(ground);
    const value = await ground.hf.transaction(async (tx) => {
      await tx.query(insert(name));
      return 42;
    });
    assert.equal(value, 42);
    assert.equal(await count(ground, name), 1);
  },

  "has in its body what is bound to its trace, each its own, while several wait": async ({ hf }) => {
    const store = new AsyncLocalStorage<object>();
    const { start } = tracingChannel("holdfast:transaction");
    start.bindStore(store, (message) => message);
    try {
      const seen = await Promise.all(
        Array.from({ length: 5 }, () =>
          hf.transaction(async (tx) => {
            const before = store.getStore();
            await tx.query(sql`SELECT 1 AS n`);
            assert.equal(store.getStore(), before);
            return before;
          }),
        ),
      );
      assert.ok(seen.every((each) => each !== undefined));
      assert.equal(new Set(seen).size, seen.length);
    } finally {
      start.unbindStore(store);
    }
  },

  "undoes everything when the body throws, and passes its error on": async (ground) => {
    const name = await table(ground);
    const thrown = new Error("no");
    let attempts = 0;
    const running = ground.hf.transaction(async (tx) => {
      attempts++;
      await tx.query(insert(name));
      throw thrown;
    });
    await assert.rejects(running, (error) => error === thrown);
    assert.equal(attempts, 1);
    assert.equal(await count(ground, name), 0);
  },

  "passes on whatever the body throws, as it is": async (ground) => {
    const name = await table(ground);
    const { proxy, revoke } = Proxy.revocable({}, {});
    revoke();
    const trap = Object.defineProperty(new Error("no"), "code", {
      get() {
        throw new Error("it was looked at");
      },
    });
    const odd: unknown[] = [undefined, null, "", 0, Symbol("s"), Object.create(null), proxy, trap];
    for (const thrown of [...odd, Object.freeze(new Error("frozen")), Promise.resolve("kept")]) {
      const running = ground.hf.transaction(async (tx) => {
        await tx.query(insert(name));
        throw thrown;
      });
      // Boxed: what is resolved to a promise is resolved to what that is resolved to.
      const found = await running.then(
        () => assert.fail("it has to throw"),
        (error: unknown) => ({ error }),
      );
      // A revoked proxy can be compared, and nothing else.
      assert.ok(Object.is(found.error, thrown), `the ${typeof thrown} that was thrown was replaced`);
    }
    assert.equal(await count(ground, name), 0);
  },

  "undoes only the nested part when a nested body throws": nested(async (ground) => {
    const { hf } = ground;
    const name = await table(ground);
    await hf.transaction(async (tx) => {
      await tx.query(insert(name, "outer"));
      await assert.rejects(
        hf.transaction(async (inner) => {
          await inner.query(insert(name, "inner"));
          throw new Error("inner");
        }),
        /inner/,
      );
      await tx.transaction((inner) => inner.query(insert(name, "kept")));
    });
    assert.equal(await count(ground, name), 2);
  }),

  "runs nested siblings one after the other, so that one's failure is not the other's": nested(
    async (ground) => {
      const { hf } = ground;
      const name = await table(ground);
      await hf.transaction(async () => {
        const results = await Promise.allSettled(
          Array.from({ length: 6 }, (_, i) =>
            hf.transaction(async (inner) => {
              await inner.query(insert(name, `s${i}`));
              await new Promise((resolve) => setTimeout(resolve, 2));
              if (i % 2 === 0) throw new Error(`sibling ${i}`);
            }),
          ),
        );
        assert.deepEqual(
          results.map(({ status }) => status),
          ["rejected", "fulfilled", "rejected", "fulfilled", "rejected", "fulfilled"],
        );
      });
      assert.equal(await count(ground, name), 3);
    },
  ),

  "takes an outer tx used inside a nested body for the nested one": nested(async (ground) => {
    const name = await table(ground);
    await ground.hf.transaction(async (tx) => {
      await assert.rejects(
        tx.transaction(async () => {
          // Would wait for itself if it queued up behind the nested body it is in.
          await tx.transaction((inner) => inner.query(insert(name)));
          await tx.lock(key("nested", ground.fresh));
          throw new Error("undo");
        }),
        /undo/,
      );
      assert.equal(tx.holds(key("nested", ground.fresh)), false);
    });
    assert.equal(await count(ground, name), 0);
  }),

  "ends a body that outlives its deadline, and keeps nothing of it": async (ground) => {
    const name = await table(ground);
    const running = ground.hf.transaction({ deadline: 300 }, async (tx) => {
      await tx.query(insert(name));
      await new Promise((resolve) => tx.signal.addEventListener("abort", resolve));
      return "late";
    });
    await assert.rejects(running, DeadlineExceededError);
    assert.equal(await count(ground, name), 0);
  },

  "refuses to write in a read-only transaction": async (ground) => {
    const name = await table(ground);
    await assert.rejects(ground.hf.transaction({ readOnly: true }, (tx) => tx.query(insert(name))));
    assert.equal(await count(ground, name), 0);
    await ground.hf.transaction((tx) => tx.query(insert(name)));
    assert.equal(await count(ground, name), 1);
  },

  "refuses the use of a transaction that is over": async (ground) => {
    const escaped = await ground.hf.transaction(async (tx) => tx);
    await assert.rejects(
      escaped.query(sql`SELECT 1 AS one`),
      (error: unknown) => error instanceof UsageError && error.code === "HF_TRANSACTION_OVER",
    );
    await assert.rejects(escaped.lock(key("over", ground.fresh)), UsageError);
  },

  "knows a violated unique key, whatever the client wraps it in": async (ground) => {
    const name = await table(ground);
    await execute(ground.site, sql`CREATE UNIQUE INDEX ${sql.id(`${name}_k`)} ON ${sql.id(name)} (k)`);
    await ground.hf.transaction((tx) => tx.query(insert(name)));
    const error: unknown = await ground.hf
      .transaction((tx) => tx.query(insert(name)))
      .catch((e: unknown) => e);
    assert.ok(isUniqueViolation(error), String(error));
    assert.ok(isUniqueViolation(new Error("wrapped", { cause: error })));
    assert.equal(isUniqueViolation(new Error("other")), false);
  },

  "binds values, whatever they hold": async (ground) => {
    const name = await table(ground);
    const nasty = `'"\`\\; DROP TABLE ${name}; -- */ 😀 $1 ? :x`.slice(0, 40);
    await ground.hf.transaction((tx) => tx.query(insert(name, nasty)));
    const rows = await ground.hf.transaction((tx) => tx.query(sql`SELECT k FROM ${sql.id(name)}`));
    assert.deepEqual(
      rows.map(({ k }) => k),
      [nasty],
    );
  },

  "runs the whole outermost transaction again after a deadlock": async (ground) => {
    const { hf, other, capabilities, fresh } = ground;
    if (capabilities.granularity === "database") return runsOneAtATime(ground);
    const name = await table(ground);
    for (const k of ["x", "y"]) await hf.transaction((tx) => tx.query(insert(name, k)));
    let attempts = 0;
    let meeting = 0;
    let meet!: () => void;
    const met = new Promise<void>((resolve) => (meet = resolve));
    const update = (instance: typeof hf, [first, second]: readonly string[]) =>
      instance.transaction({ retry: { attempts: 10 } }, async (tx) => {
        attempts++;
        await tx.query(sql`UPDATE ${sql.id(name)} SET n = n + 1 WHERE k = ${first}`);
        // Both hold their first row before either asks for its second: a deadlock, the first time.
        if (++meeting === 2) meet();
        await met;
        await tx.query(sql`UPDATE ${sql.id(name)} SET n = n + 1 WHERE k = ${second}`);
      });
    await hf.transaction(async (tx) => {
      await tx.query(sql`SELECT 1 AS one`);
    });
    await Promise.all([update(hf, ["x", "y"]), update(other, ["y", "x"])]);
    const rows = await hf.transaction((tx) => tx.query(sql`SELECT k, n FROM ${sql.id(name)} ORDER BY k`));
    assert.deepEqual(
      rows.map(({ n }) => Number(n)),
      [3, 3],
      fresh,
    );
    assert.ok(attempts > 2, `no deadlock happened: ${attempts} attempts`);
  },

  "takes migrations once, from any number of processes": async ({ hf, other }) => {
    const applied = await Promise.all([hf.migrate(), other.migrate(), hf.migrate()]);
    assert.deepEqual(applied.flat(), []);
    assert.match(hf.migrationSql(), /-- holdfast 1/);
  },
});

/** Where one transaction runs at a time there is nothing to deadlock with. */
async function runsOneAtATime(ground: Ground): Promise<void> {
  const name = await table(ground);
  let inside = 0;
  await Promise.all(
    [ground.hf, ground.other, ground.hf].map((instance) =>
      instance.transaction(async (tx) => {
        assert.equal(++inside, 1);
        await tx.query(insert(name));
        inside--;
      }),
    ),
  );
  assert.equal(await count(ground, name), 3);
}
