import { isSupported } from "../../seam/capabilities.ts";
import {
  LockNotAvailableError,
  LockTimeoutError,
  NotInTransactionError,
  RowsMissingError,
  UnsupportedError,
  UsageError,
} from "../../seam/errors.ts";
import { key } from "../../seam/key.ts";
import { rows } from "../../seam/row-options.ts";
import type { RowStrength } from "../../seam/tables.ts";
import { type Ground, execute } from "../ground.ts";
import { TestGate, assert, during, sql, suite, where } from "./support.ts";

/** Clients differ in what they make of an integer. */
type Integer = number | bigint | string;

interface Item {
  id: Integer;
  name: string;
  n: Integer;
  state: string | null;
}

/** Ten rows: ids 1 to 10, names n1 to n10, n = 100; the even ones are "open", the odd ones have no state. */
async function items({ site, fresh }: Ground): Promise<string> {
  const name = fresh.replaceAll("-", "_");
  await execute(
    site,
    sql`CREATE TABLE ${sql.id(name)} (id integer NOT NULL PRIMARY KEY, name varchar(40) NOT NULL, n integer NOT NULL, state varchar(10))`,
  );
  for (let id = 1; id <= 10; id++)
    await execute(
      site,
      sql`INSERT INTO ${sql.id(name)} (id, name, n, state) VALUES (${id}, ${`n${id}`}, ${100}, ${id % 2 === 0 ? "open" : null})`,
    );
  return name;
}

const ids = (found: readonly { id: unknown }[]) => found.map(({ id }) => Number(id));

/** Whether two transactions can be inside at the same time. */
const concurrent = ({ capabilities: { connections, granularity } }: Ground) =>
  connections === "many" && granularity === "key";

const rowCase = (run: (ground: Ground) => Promise<void>) =>
  where(
    ({ capabilities }) => capabilities.rowLocks,
    run,
    ({ hf }) => hf.transaction((tx) => tx.rows("whatever", [1])),
  );

/** Runs a case's body only where it can be told whether a lock is held. */
const contended = (run: (ground: Ground) => Promise<void>) =>
  rowCase(async (ground) => {
    if (concurrent(ground)) await run(ground);
  });

export const rowCases = suite("rows", {
  "come in the order asked for, one for each key": rowCase(async (ground) => {
    const { hf } = ground;
    const table = await items(ground);
    await hf.transaction(async (tx) => {
      const [third, first, again] = await tx.rows<Item>(table, [3, 1, 3]);
      assert.deepEqual([third?.name, first?.name, again?.name], ["n3", "n1", "n3"]);
      const { name, n } = await tx.row<Item>(table, 7);
      assert.deepEqual([name, Number(n)], ["n7", 100]);
      assert.deepEqual([...(await tx.rows(table, []))], []);
    });
  }),

  "are locked until the transaction ends": contended(async (ground) => {
    const { hf, other } = ground;
    const table = await items(ground);
    await during(
      (inside) =>
        other.transaction(async (tx) => {
          await tx.rows(table, [1, 2]);
          await inside();
        }),
      async () => {
        for (const which of [[2], [3, 2]])
          await assert.rejects(
            hf.transaction((tx) => tx.rows(table, which, { wait: "nowait" })),
            (error: unknown) => {
              assert.ok(error instanceof LockNotAvailableError, String(error));
              assert.match(error.message, /\[.*2.*\]/);
              return true;
            },
          );
        await assert.rejects(
          hf.transaction((tx) => tx.rows(table, [1], { wait: 150 })),
          LockTimeoutError,
        );
        await hf.transaction((tx) => tx.rows(table, [3, 4], { wait: "nowait" }));
      },
    );
    await hf.transaction((tx) => tx.rows(table, [1, 2], { wait: "nowait" }));
  }),

  "wait for the holder, and show what it wrote": contended(async (ground) => {
    const { hf, other } = ground;
    const table = await items(ground);
    const inside = new TestGate();
    const holder = other.transaction(async (tx) => {
      await tx.rows(table, [5]);
      inside.open();
      await tx.query(sql`UPDATE ${sql.id(table)} SET n = ${7} WHERE id = ${5}`);
      await new Promise((resolve) => setTimeout(resolve, 100));
    });
    await inside.opened;
    const { n } = await hf.transaction((tx) => tx.row<Item>(table, 5, { wait: 60_000 }));
    await holder;
    assert.equal(Number(n), 7);
  }),

  "that are missing are named, or reported": rowCase(async (ground) => {
    const { hf } = ground;
    const table = await items(ground);
    for (const keys of [[77], [1, 77, 2, 78]])
      await assert.rejects(
        hf.transaction((tx) => tx.rows(table, keys)),
        (error: unknown) => {
          assert.ok(error instanceof RowsMissingError, String(error));
          assert.deepEqual(
            error.missing,
            keys.filter((id) => id > 10),
          );
          assert.match(error.message, /77/);
          return true;
        },
      );
    await hf.transaction(async (tx) => {
      const found = await tx.rows<Item>(table, [1, 77, 2, 78], { missing: "report" });
      assert.deepEqual([ids(found), found.missing, found.skipped], [[1, 2], [77, 78], []]);
      assert.deepEqual((await tx.rows(table, [79], { missing: "report" })).missing, [79]);
      await assert.rejects(
        tx.transaction((inner) => inner.row(table, 80)),
        RowsMissingError,
      );
    });
  }),

  "that are locked are skipped on request, and told from those that are missing": contended(
    async (ground) => {
      const { hf, other } = ground;
      const table = await items(ground);
      await during(
        (inside) =>
          other.transaction(async (tx) => {
            await tx.rows(table, [2, 4]);
            await inside();
          }),
        async () => {
          await hf.transaction(async (tx) => {
            const found = await tx.rows<Item>(table, [5, 4, 99, 2, 1], { wait: "skip", missing: "report" });
            assert.deepEqual([ids(found), found.skipped, found.missing], [[5, 1], [4, 2], [99]]);
            assert.equal(await tx.row(table, 4, { wait: "skip" }), undefined);
            const open = await tx.rows<Item>(
              table,
              { state: "open" },
              { wait: "skip", orderBy: { id: "desc" }, limit: 2 },
            );
            assert.deepEqual(ids(open), [10, 8]);
            assert.deepEqual(
              ids(await tx.rows<Item>(table, { state: "open" }, { wait: "skip" })),
              [6, 8, 10],
            );
          });
        },
      );
    },
  ),

  "by a condition: equality, lists, null and the caller's own SQL": rowCase(async (ground) => {
    const { hf } = ground;
    const table = await items(ground);
    await hf.transaction(async (tx) => {
      assert.deepEqual(ids(await tx.rows<Item>(table, { state: null })), [1, 3, 5, 7, 9]);
      assert.deepEqual(ids(await tx.rows<Item>(table, { state: "open", id: [2, 3, 4] })), [2, 4]);
      assert.deepEqual(ids(await tx.rows<Item>(table, { name: "it's" })), []);
      assert.deepEqual(ids(await tx.rows<Item>(table, sql`id > ${8} AND n = ${100}`)), [9, 10]);
      const picked = await tx.rows<Item>(table, { state: "open" }, { orderBy: { id: "desc" }, limit: 3 });
      assert.deepEqual(ids(picked), [10, 8, 6]);
      const all = await tx.rows<Item>(table, sql`id < 4`, {
        orderBy: [{ state: "desc" }, "id"],
        columns: ["id", "state"],
      });
      assert.deepEqual(
        all.map((row) => Object.keys(row).toSorted()),
        [
          ["id", "state"],
          ["id", "state"],
          ["id", "state"],
        ],
      );
      assert.equal(all.length, 3);
    });
  }),

  "no longer matching after the wait are left out": contended(async (ground) => {
    const { hf, other } = ground;
    const table = await items(ground);
    for (const options of [{}, { orderBy: "n", limit: 3 } as const]) {
      const inside = new TestGate();
      const holder = other.transaction(async (tx) => {
        await tx.rows(table, [2]);
        inside.open();
        await tx.query(sql`UPDATE ${sql.id(table)} SET state = ${"done"} WHERE id = ${2}`);
        await new Promise((resolve) => setTimeout(resolve, 100));
      });
      await inside.opened;
      const found = await hf.transaction((tx) =>
        tx.rows<Item>(table, sql`state = ${"open"} AND id < ${5}`, { wait: 60_000, ...options }),
      );
      await holder;
      assert.deepEqual(ids(found), [4]);
      await execute(ground.site, sql`UPDATE ${sql.id(table)} SET state = ${"open"} WHERE id = ${2}`);
    }
  }),

  "of different strengths": contended(async (ground) => {
    const { hf, other, capabilities } = ground;
    const table = await items(ground);
    const { rowLocks } = capabilities;
    assert.ok(isSupported(rowLocks));
    const compatible: Record<RowStrength, readonly RowStrength[]> = {
      update: [],
      "no key update": ["key share"],
      share: ["share", "key share"],
      "key share": ["no key update", "share", "key share"],
    };
    for (const held of Object.keys(compatible) as RowStrength[]) {
      if (!rowLocks.includes(held)) {
        await assert.rejects(
          hf.transaction((tx) => tx.rows(table, [1], { for: held })),
          UnsupportedError,
        );
        continue;
      }
      await during(
        (inside) =>
          other.transaction(async (tx) => {
            await tx.rows(table, [1], { for: held });
            await inside();
          }),
        async () => {
          for (const wanted of rowLocks) {
            const got = await hf
              .transaction((tx) => tx.rows(table, [1], { for: wanted, wait: "nowait" }))
              .then(() => true)
              .catch((error: unknown) => {
                if (error instanceof LockNotAvailableError) return false;
                throw error;
              });
            assert.equal(got, compatible[held].includes(wanted), `${wanted} while ${held} is held`);
          }
        },
      );
    }
  }),

  "with composite keys and odd names": rowCase(async (ground) => {
    const { hf, site, fresh } = ground;
    const table = `an odd "name".with'all ${fresh}`.slice(0, 60);
    await execute(
      site,
      sql`CREATE TABLE ${sql.id(table)} (${sql.id('the "org"')} varchar(40) NOT NULL, no integer NOT NULL, v integer NOT NULL, PRIMARY KEY (${sql.id('the "org"')}, no))`,
    );
    const orgs = ["it's", 'a "b"', "back\\slash", "{braces,}", "ü漢😀", "a", " "];
    for (const [i, org] of orgs.entries())
      await execute(
        site,
        sql`INSERT INTO ${sql.id(table)} (${sql.id('the "org"')}, no, v) VALUES (${org}, ${1}, ${i}), (${org}, ${2}, ${i + 100})`,
      );
    await hf.transaction(async (tx) => {
      const keys = orgs.flatMap((org) => [2, 1].map((no) => ({ 'the "org"': org, no })));
      const found = await tx.rows<{ v: Integer }>(sql.id(table), keys as never);
      assert.deepEqual(
        found.map(({ v }) => Number(v)),
        orgs.flatMap((_, i) => [i + 100, i]),
      );
      const one = await tx.row<{ v: Integer }>(sql.id(table), { 'the "org"': "it's", no: 1 } as never);
      assert.equal(Number(one.v), 0);
      await assert.rejects(
        tx.transaction((inner) => inner.rows(sql.id(table), ["a"])),
        UsageError,
      );
    });
  }),

  "in the caller's own transaction": rowCase(async (ground) => {
    const { hf, other, site } = ground;
    const table = await items(ground);
    await site.ownTransaction(async (native) => {
      assert.deepEqual(ids(await hf.join(native).rows<Item>(table, [2, 1])), [2, 1]);
      if (concurrent(ground))
        await assert.rejects(
          other.transaction((tx) => tx.rows(table, [1], { wait: "nowait" })),
          LockNotAvailableError,
        );
    });
  }),

  "are refused outside of a transaction": rowCase(async (ground) => {
    const { hf, site } = ground;
    const table = await items(ground);
    await site.withIdle(async (native) => {
      await assert.rejects(async () => hf.join(native).rows(table, [1]), NotInTransactionError);
      await assert.rejects(async () => hf.join(native).rows(table, { state: "open" }), NotInTransactionError);
    });
  }),

  "are free again after a rollback to the savepoint": contended(async (ground) => {
    const { hf, other } = ground;
    const table = await items(ground);
    await hf.transaction(async (tx) => {
      await assert.rejects(
        tx.transaction(async (inner) => {
          await inner.rows(table, [1]);
          throw new Error("never mind");
        }),
        /never mind/,
      );
      await assert.rejects(
        tx.transaction((inner) => inner.rows(table, [99])),
        RowsMissingError,
      );
      // It goes on after a refusal inside of a savepoint.
      await during(
        (inside) =>
          other.transaction(async (theirs) => {
            await theirs.rows(table, [3]);
            await inside();
          }),
        async () => {
          await assert.rejects(
            tx.transaction((inner) => inner.rows(table, [3], { wait: "nowait" })),
            LockNotAvailableError,
          );
          await assert.rejects(
            tx.transaction((inner) => inner.rows(table, [3], { wait: 50 })),
            LockTimeoutError,
          );
        },
      );
      assert.deepEqual(ids(await tx.rows<Item>(table, [3])), [3]);
    });
  }),

  "that cannot be meant are refused": rowCase(async (ground) => {
    const { hf } = ground;
    const table = await items(ground);
    const wrong: [unknown, unknown?][] = [
      [[undefined]],
      [[null]],
      [[""]],
      [[Number.NaN]],
      [[{ id: undefined }]],
      [[{ id: 1, nme: 2 }]],
      [{}],
      [{ state: undefined }],
      [{ state: [null] }],
      [{ sate: "open" }],
      ["id = 1"],
      [undefined],
      [7],
      [[1], { fro: "update" }],
      [[1], { for: "updat" }],
      [[1], { wait: "forever" }],
      [[1], { wait: -1 }],
      [[1], { limit: 1 }],
      [[1], { columns: [] }],
      [[1], { columns: ["nme"] }],
      [{ state: "open" }, { limit: 0 }],
      [{ state: "open" }, { orderBy: "nme", limit: 1 }],
      [{ state: "open" }, { orderBy: { id: "up" } }],
      [[1], { missing: "ignore" }],
      [[1], { key: ["nme"] }],
    ];
    for (const [which, options] of wrong)
      await assert.rejects(
        hf.transaction((tx) => tx.rows(table, which as never, options as never)),
        (error: unknown) => {
          assert.ok(error instanceof UsageError, `${JSON.stringify([which, options])}: ${String(error)}`);
          return true;
        },
      );
    await assert.rejects(
      hf.transaction((tx) => tx.rows("no_such_table", [1])),
      /no_such_table/,
    );
  }),

  "and keys in one call": rowCase(async (ground) => {
    const { hf, other, fresh } = ground;
    const table = await items(ground);
    const second = await items({ ...ground, fresh: `${fresh}-b` });
    const lock = key("all", fresh);
    await hf.transaction(async (tx) => {
      const [nothing, some, others, more] = await tx.lockAll([
        lock,
        rows<Item>(table, [4, 2]),
        rows<Item>(second, { state: "open" }, { orderBy: { id: "desc" }, limit: 2 }),
        rows<Item>(table, [3, 4], { for: "share", columns: ["id"] }),
      ]);
      assert.equal(nothing, undefined);
      assert.deepEqual(
        [ids(some), ids(others), more],
        [
          [4, 2],
          [10, 8],
          [{ id: 3 }, { id: 4 }],
        ],
      );
      assert.ok(tx.holds(lock));
      if (concurrent(ground)) {
        assert.deepEqual(await other.tryLock(lock, async () => 1), { acquired: false });
        await assert.rejects(
          other.transaction((theirs) => theirs.lockAll([rows(second, [10])], { wait: "nowait" })),
          LockNotAvailableError,
        );
      }
    });
    const wrong = [
      [],
      [rows(table, [1]), rows(table, { state: "open" })],
      ["key"],
      [rows(table, [1], { wait: 1 } as never)],
    ];
    for (const list of wrong)
      await assert.rejects(
        hf.transaction((tx) => tx.lockAll(list as never)),
        UsageError,
      );
  }),

  "of several tables cannot deadlock, whatever order they are named in": contended(async (ground) => {
    const { hf, other, fresh } = ground;
    const table = await items(ground);
    const second = await items({ ...ground, fresh: `${fresh}-b` });
    const turn = (which: typeof hf, i: number): Promise<void> =>
      which.transaction({ retry: false }, async (tx) => {
        const list = [
          rows(table, [1, 2]),
          rows(second, [2, 1]),
          rows(table, [2, 1]),
          key("both", fresh, i % 2),
          key("both", fresh, 0),
        ];
        await tx.lockAll(i % 2 === 0 ? list : list.toReversed(), { wait: 60_000 });
        await tx.query(sql`UPDATE ${sql.id(table)} SET n = n + 1 WHERE id IN (1, 2)`);
      });
    // A connection may be lost and the call made again; what must not happen is a deadlock.
    const insist = (which: typeof hf, i: number): Promise<void> =>
      turn(which, i).catch((error: unknown) => {
        if (which.classify(error) !== "lost") throw error;
        return insist(which, i);
      });
    await Promise.all(Array.from({ length: 40 }, (_, i) => insist(i % 4 < 2 ? hf : other, i)));
    const { n } = await hf.transaction((tx) => tx.row<Item>(table, 1));
    assert.equal(Number(n), 140);
  }),
});

export const tableCases = suite("table", {
  "locks keep others out until the end": where(
    ({ capabilities }) => capabilities.tableLocks,
    async (ground) => {
      const { hf, other } = ground;
      const table = await items(ground);
      if (!concurrent(ground)) {
        await hf.transaction((tx) => tx.table(table, "exclusive"));
        return;
      }
      await during(
        (inside) =>
          other.transaction(async (tx) => {
            await tx.table(table, "exclusive");
            await inside();
          }),
        () =>
          hf.transaction(async (tx) => {
            await assert.rejects(tx.table(table, "row exclusive", { wait: "nowait" }), LockNotAvailableError);
            await assert.rejects(tx.table(table, "share", { wait: 100 }), LockTimeoutError);
            assert.equal(await tx.table(table, "exclusive", { wait: "skip" }), false);
            // Readers pass, and the transaction has not been harmed.
            await tx.table(table, "access share", { wait: "nowait" });
            const found = await tx.query(sql`SELECT count(*) AS count FROM ${sql.id(table)}`);
            assert.equal(Number(found[0]?.count), 10);
          }),
      );
      await hf.transaction(async (tx) => {
        assert.equal(await tx.table(table, "exclusive", { wait: "skip" }), true);
        await assert.rejects(tx.table(table, "exclusiv" as never), UsageError);
      });
    },
    ({ hf }) => hf.transaction((tx) => tx.table("whatever", "exclusive")),
  ),

  "locks outside of a transaction are refused": where(
    ({ capabilities }) => capabilities.tableLocks,
    async (ground) => {
      const table = await items(ground);
      await ground.site.withIdle(async (native) => {
        await assert.rejects(
          async () => ground.hf.join(native).table(table, "exclusive"),
          NotInTransactionError,
        );
      });
    },
    ({ hf }) => hf.transaction((tx) => tx.table("whatever", "exclusive")),
  ),
});
