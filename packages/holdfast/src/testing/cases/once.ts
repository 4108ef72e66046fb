import {
  LockNotAvailableError,
  LockTimeoutError,
  NotInTransactionError,
  OnceError,
  UsageError,
} from "../../seam/errors.ts";
import type { KeyPart } from "../../seam/key.ts";
import type { Transaction } from "../../transaction/scope.ts";
import { once } from "../../index.ts";
import type { ConformanceCase, Ground } from "../ground.ts";
import { assert, during, nested, sql, suite, table, where } from "./support.ts";

/** Where nothing is kept of calls, all of them are refused. */
function kept(run: ConformanceCase["run"]): ConformanceCase["run"] {
  return where(
    ({ capabilities }) => capabilities.once,
    run,
    ({ hf, fresh }) => once(hf, fresh, async () => assert.fail("entered")),
  );
}

const never = async () => assert.fail("entered");

/** A body that leaves a trace and returns how many runs there have been. */
function effect(name: string, k = "a") {
  let runs = 0;
  return async (tx: Transaction<unknown>) => {
    await tx.query(sql`INSERT INTO ${sql.id(name)} (k, n) VALUES (${k}, ${++runs})`);
    return { run: runs };
  };
}

async function effects({ hf }: Ground, name: string): Promise<number> {
  const [row] = await hf.transaction((tx) => tx.query(sql`SELECT count(*) AS n FROM ${sql.id(name)}`));
  return Number(row?.n);
}

function coded(code: OnceError["code"], text: RegExp) {
  return (error: unknown) => {
    assert.ok(error instanceof OnceError, String(error));
    assert.equal(error.code, code);
    assert.match(error.message, text);
    return true;
  };
}

const second = 1000;
const day = 86_400 * second;

export const onceCases = suite("once", {
  "runs the body once, and answers again with what it returned": kept(async (ground) => {
    const { hf, other, fresh } = ground;
    const name = await table(ground);
    const body = effect(name);
    assert.deepEqual(await once(hf, fresh, body), { status: "done", value: { run: 1 }, replayed: false });
    for (const instance of [hf, other])
      assert.deepEqual(await once(instance, [fresh], never), {
        status: "done",
        value: { run: 1 },
        replayed: true,
      });
    assert.equal(await effects(ground, name), 1);
  }),

  "runs the body once for duplicates that come at the same time": kept(async (ground) => {
    const { hf, other, fresh } = ground;
    const name = await table(ground);
    const body = effect(name);
    const results = await Promise.all(
      Array.from({ length: 12 }, (_, i) => once(i % 2 ? hf : other, ["x", fresh], body, { wait: 60_000 })),
    );
    assert.deepEqual([...new Set(results.map(({ value }) => value.run))], [1]);
    assert.equal(results.filter(({ replayed }) => !replayed).length, 1);
    assert.equal(await effects(ground, name), 1);
  }),

  "keeps nothing of a body that throws, and runs it again": kept(async (ground) => {
    const { hf, fresh } = ground;
    const name = await table(ground);
    const body = effect(name);
    const thrown = new Error("no");
    const failing = once(hf, fresh, async (tx) => {
      await body(tx);
      throw thrown;
    });
    await assert.rejects(failing, (error) => error === thrown);
    assert.equal(await effects(ground, name), 0);
    assert.deepEqual(await once(hf, fresh, body), { status: "done", value: { run: 2 }, replayed: false });
    assert.equal(await effects(ground, name), 1);
  }),

  "says that it is in progress, or waits, as asked": kept(async (ground) => {
    const { hf, other, fresh } = ground;
    let waiting: ReturnType<typeof once> | undefined;
    await during(
      (inside) => once(hf, fresh, inside),
      async () => {
        assert.deepEqual(await once(other, fresh, never, { wait: "skip" }), { status: "in progress" });
        await assert.rejects(once(other, fresh, never, { wait: "nowait" }), LockNotAvailableError);
        await assert.rejects(once(other, fresh, never, { wait: 100 }), (error: unknown) => {
          assert.ok(error instanceof LockTimeoutError, String(error));
          assert.match(error.message, new RegExp(fresh));
          return true;
        });
        waiting = once(other, fresh, never, { wait: 60_000 });
      },
    );
    assert.deepEqual(await waiting, { status: "done", value: undefined, replayed: true });
    assert.deepEqual(await once(other, fresh, never, { wait: "skip" }), {
      status: "done",
      value: undefined,
      replayed: true,
    });
    // The body's own refusal of something else is not an answer about this id.
    const own = new LockNotAvailableError({ keys: ["x"], holders: [] });
    const throwing = async () => {
      throw own;
    };
    await assert.rejects(
      once(other, [fresh, 2], throwing, { wait: "skip" }),
      (error: unknown) => error === own,
    );
  }),

  "refuses another payload under the same id": kept(async (ground) => {
    const { hf, other, fresh } = ground;
    const payload = { amount: 5, to: { name: "Ada", tags: ["a", null, true] } };
    await once(hf, fresh, async () => "paid", { payload });
    // The order of keys says nothing.
    const same = { to: { tags: ["a", null, true], name: "Ada" }, amount: 5 };
    assert.equal((await once(other, fresh, never, { payload: same })).value, "paid");
    for (const different of [{ ...payload, amount: 6 }, { ...payload, to: null }, [payload], "5", 5, null])
      await assert.rejects(
        once(other, fresh, never, { payload: different }),
        coded("HF_ONCE_CONFLICT", new RegExp(`${fresh}: it was used with another payload at 2`)),
      );
    await assert.rejects(
      once(other, fresh, never),
      coded("HF_ONCE_CONFLICT", /with a payload .*has none now/),
    );
    await once(hf, [fresh, 2], async () => 1);
    await assert.rejects(
      once(hf, [fresh, 2], never, { payload }),
      coded("HF_ONCE_CONFLICT", /without a payload/),
    );
  }),

  "takes part in a transaction: kept with it, undone with it": kept(async (ground) => {
    const { hf, fresh } = ground;
    const name = await table(ground);
    const body = effect(name);
    const undo = new Error("undo");
    for (const given of [true, false]) {
      const id = [fresh, String(given)];
      const options = (tx: Transaction<unknown>) => (given ? { tx } : {});
      const undone = hf.transaction(async (tx) => {
        assert.equal((await once(hf, id, body, options(tx))).replayed, false);
        assert.equal((await once(hf, id, never, options(tx))).replayed, true);
        throw undo;
      });
      await assert.rejects(undone, (error) => error === undo);
      assert.equal(await effects(ground, name), given ? 0 : 1);
      const { value, replayed } = await hf.transaction((tx) => once(hf, id, body, options(tx)));
      assert.equal(replayed, false);
      assert.deepEqual((await once(hf, id, never)).value, value);
    }
    assert.equal(await effects(ground, name), 2);
  }),

  "leaves no effects without a record where the body's error is swallowed": kept(
    nested(async (ground) => {
      const { hf, site, fresh } = ground;
      const name = await table(ground);
      const body = effect(name);
      const failing = (id: readonly string[], tx: Transaction<unknown>) =>
        assert.rejects(
          once(
            hf,
            id,
            async (inner) => {
              await body(inner);
              throw new Error("swallowed");
            },
            { tx },
          ),
          /swallowed/,
        );
      await hf.transaction((tx) => failing([fresh, "own"], tx));
      await site.ownTransaction((native) => failing([fresh, "joined"], hf.join(native)));
      assert.equal(await effects(ground, name), 0);
      for (const which of ["own", "joined"])
        assert.equal((await once(hf, [fresh, which], body)).replayed, false);
      assert.equal(await effects(ground, name), 2);
    }),
  ),

  "takes part in a transaction that the caller opened": kept(async (ground) => {
    const { hf, other, site, fresh } = ground;
    const name = await table(ground);
    const body = effect(name);
    const first = await site.ownTransaction((native) => once(hf, fresh, body, { tx: native }));
    assert.deepEqual(first, { status: "done", value: { run: 1 }, replayed: false });
    const again = await site.ownTransaction((native) => once(hf, fresh, never, { tx: hf.join(native) }));
    assert.deepEqual(again, { ...first, replayed: true });
    assert.equal((await once(other, fresh, never)).replayed, true);
    assert.equal(await effects(ground, name), 1);
  }),

  "forgets after its horizon, and not before": kept(async (ground) => {
    const { hf, fresh } = ground;
    const name = await table(ground);
    const body = effect(name);
    await once(hf, [fresh, "long"], body);
    await once(hf, fresh, body, { keepFor: second });
    for (;;) {
      const { replayed, value } = await once(hf, fresh, body, { payload: 1 }).catch((error: unknown) => {
        assert.ok(coded("HF_ONCE_CONFLICT", /without a payload/)(error));
        return { replayed: true, value: { run: 0 } };
      });
      // Neither the result nor the payload of a record that has run out counts any more.
      assert.equal(value.run, replayed ? 0 : 3);
      if (!replayed) break;
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    assert.equal((await once(hf, [fresh, "long"], never)).replayed, true);
    assert.equal(await effects(ground, name), 3);
  }),

  "refuses a message that is older than the records": kept(async (ground) => {
    const { hf, fresh } = ground;
    const ago = (ms: number) => new Date(Date.now() - ms);
    await assert.rejects(
      once(hf, fresh, never, { issuedAt: ago(8 * day) }),
      coded(
        "HF_ONCE_TOO_OLD",
        new RegExp(`${fresh}: it was made 8.0 days ago, records are kept for 7.0 days`),
      ),
    );
    await assert.rejects(
      once(hf, fresh, never, { issuedAt: ago(day), keepFor: 3600 * second }),
      coded("HF_ONCE_TOO_OLD", /1.0 days ago, records are kept for 3600 s/),
    );
    const keepFor = 9 * day;
    assert.equal((await once(hf, fresh, async () => 1, { issuedAt: ago(8 * day), keepFor })).replayed, false);
    // It is known what became of it, however old it is.
    assert.equal((await once(hf, fresh, never, { issuedAt: ago(100 * day) })).replayed, true);
  }),

  "keeps ids apart, whatever they hold": kept(async ({ hf, other, fresh }) => {
    const long = "x".repeat(10_000);
    const ids: (string | KeyPart[])[] = [
      `${fresh}😀`,
      `${fresh}é`,
      `${fresh}e\u0301`,
      `${fresh}'"\\;--$1 %s {} \n\t\0`,
      `${fresh}${long}`,
      `${fresh}${long}y`,
      [fresh, "a", "b"],
      [fresh, "a:b"],
      [fresh, "a,b"],
      [fresh, `a","b`],
      [`${fresh}a`, "b"],
      [fresh, "A", "b"],
      [fresh, 7],
      [fresh, 7n ** 30n],
    ];
    for (const [i, id] of ids.entries()) assert.equal((await once(hf, id, async () => i)).replayed, false);
    for (const [i, id] of ids.entries())
      assert.deepEqual(await once(other, id, never), { status: "done", value: i, replayed: true });
    assert.equal((await once(hf, [fresh, "7"], never)).value, 12, "a number and its text are the same part");
    for (const id of ["", [], [fresh, ""], [fresh, undefined], [fresh, 0.5], undefined, null, 7, {}])
      await assert.rejects(once(hf, id as string, never), UsageError);
  }),

  "gives the first caller exactly what a duplicate gets": kept(async ({ hf, fresh }) => {
    const results: unknown[] = [
      undefined,
      null,
      0,
      -1.5e300,
      "",
      "\0 \ud800 😀 \u2028",
      true,
      [],
      {},
      [[1, [2]], { a: { b: null } }],
      { "": 1, "a b": 2, toString: 3 },
      Object.assign(Object.create(null) as object, { a: 1 }),
    ];
    for (const [i, result] of results.entries()) {
      const first = await once(hf, [fresh, i], async () => result);
      const again = await once(hf, [fresh, i], never);
      assert.deepEqual(again, { ...first, replayed: true });
      assert.equal(JSON.stringify(first.value), JSON.stringify(result));
    }
  }),

  "refuses a result or a payload that is not JSON, and keeps nothing": kept(async (ground) => {
    const { hf, fresh } = ground;
    const name = await table(ground);
    class Money {
      amount = 1;
    }
    const cycle: { self?: unknown } = {};
    cycle.self = [cycle];
    const wrong: [unknown, RegExp][] = [
      [{ made: new Date() }, /result\.made is a Date/],
      [{ a: [1, { b: undefined }] }, /result\.a\[1\]\.b is undefined/],
      [[1, Number.NaN], /result\[1\] is NaN/],
      [Infinity, /result is Infinity/],
      [{ "a b": 5n }, /result\["a b"\] is a bigint/],
      [new Map(), /result is a Map/],
      [new Money(), /result is a Money/],
      [Buffer.from("x"), /result is a Buffer/],
      [cycle, /result\.self\[0\] is a part of itself/],
      [() => 1, /result is a function/],
      [Symbol("s"), /result is a symbol/],
      // oxlint-disable-next-line no-sparse-arrays
      [[1, , 2], /result\[1\] is undefined/],
    ];
    const body = effect(name);
    for (const [value, text] of wrong) {
      const returning = once(hf, fresh, async (tx) => {
        await body(tx);
        return value;
      });
      await assert.rejects(returning, (error: unknown) => {
        assert.ok(error instanceof UsageError, String(error));
        assert.match(error.message, text);
        return true;
      });
      await assert.rejects(
        once(hf, fresh, never, { payload: value }),
        new RegExp(text.source.replace("result", "payload")),
      );
    }
    assert.equal(await effects(ground, name), 0);
    // The same part twice is no cycle.
    const part = { a: 1 };
    assert.deepEqual((await once(hf, fresh, async () => [part, part])).value, [part, part]);
  }),

  "refuses a body that records its own id": kept(async ({ hf, fresh }) => {
    await assert.rejects(
      once(hf, fresh, () => once(hf, fresh, async () => 1)),
      /Does the body call once with the same id\?/,
    );
    assert.equal((await once(hf, fresh, async () => 1)).replayed, false);
  }),

  "refuses options that cannot be right": kept(async ({ hf, other, fresh }) => {
    const wrong: Record<string, unknown>[] = [
      { keepfor: 5000 },
      { isolation: "serializable" },
      { lock: "x" },
      { wait: "later" },
      { keepFor: 999 },
      { keepFor: Number.NaN },
      { keepFor: "7 days" },
      { keepFor: Infinity },
      { issuedAt: new Date(Number.NaN) },
      { issuedAt: Date.now() },
      { payload: undefined },
      { signal: {} },
      { tx: 1 },
    ];
    for (const options of wrong)
      await assert.rejects(once(hf, fresh, never, options), UsageError, Object.keys(options).join());
    await assert.rejects(once(hf, fresh, never, { tx: {} }), NotInTransactionError);
    await assert.rejects(once(hf, fresh, undefined as never), UsageError);
    await assert.rejects(once({} as never, fresh, never), UsageError);
    await hf.transaction(async (tx) => {
      await assert.rejects(once(other, fresh, never, { tx }), UsageError);
      await assert.rejects(once(hf, fresh, never, { tx, deadline: 1000 }), UsageError);
    });
    await assert.rejects(
      hf.transaction({ isolation: "repeatable read" }, () => once(hf, fresh, never)),
      UsageError,
    );
    const signal = AbortSignal.abort(new Error("no longer wanted"));
    await assert.rejects(once(hf, fresh, never, { signal }), /no longer wanted/);
  }),
});
