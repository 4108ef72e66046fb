import { RowsMissingError, StaleVersionError, UsageError } from "../../seam/errors.ts";
import { versioned } from "../../index.ts";
import { type Ground, execute } from "../ground.ts";
import { TestGate, assert, sql, suite, where } from "./support.ts";

/** Clients differ in what they make of an integer. */
type Integer = number | bigint | string;

interface Account {
  id: Integer;
  balance: Integer;
  note: string | null;
  version: Integer;
}

async function accounts(ground: Ground, count = 3): Promise<string> {
  const name = ground.fresh.replaceAll("-", "_");
  await execute(
    ground.site,
    sql`CREATE TABLE ${sql.id(name)} (id integer NOT NULL PRIMARY KEY, balance integer NOT NULL, note varchar(100), version integer NOT NULL DEFAULT 0)`,
  );
  for (let id = 1; id <= count; id++)
    await execute(ground.site, sql`INSERT INTO ${sql.id(name)} (id, balance) VALUES (${id}, ${100})`);
  return name;
}

const versionCase = (run: (ground: Ground) => Promise<void>) =>
  where(
    ({ capabilities }) => capabilities.versions,
    run,
    ({ hf }) => versioned(hf, "whatever").update(1, () => ({})),
  );

const numbers = ({ balance, version }: Account) => [Number(balance), Number(version)];

export const versionCases = suite("versioned", {
  "writes, and counts the version up": versionCase(async (ground) => {
    const table = await accounts(ground);
    const rows = versioned<Account>(ground.hf, table);
    const first = await rows.update(1, ({ balance }) => ({
      balance: Number(balance) - 10,
      note: `it's "quoted" \\ 😀`,
    }));
    assert.deepEqual([...numbers(first), first.note], [90, 1, `it's "quoted" \\ 😀`]);
    const second = await rows.update(1, async () => ({ note: null }));
    assert.deepEqual([...numbers(second), second.note], [90, 2, null]);
    assert.deepEqual(numbers(await rows.update(1, () => undefined)), [90, 2]);
    assert.deepEqual(numbers((await rows.read(1)) as Account), [90, 2]);
    assert.equal(await rows.read(9), undefined);
    await assert.rejects(
      rows.update(9, () => ({ balance: 1 })),
      RowsMissingError,
    );
  }),

  "decides anew when somebody was faster": versionCase(async (ground) => {
    const table = await accounts(ground);
    const rows = versioned<Account>(ground.hf, table);
    const others = versioned<Account>(ground.other, table);
    let runs = 0;
    const row = await rows.update(1, async ({ balance }) => {
      if (++runs <= 3) await others.update(1, (theirs) => ({ balance: Number(theirs.balance) + 1 }));
      return { balance: Number(balance) * 2 };
    });
    assert.deepEqual([runs, ...numbers(row)], [4, 206, 4]);
  }),

  "lets callers that have met at a row take turns": versionCase(async (ground) => {
    const table = await accounts(ground);
    const rows = versioned<Account>(ground.hf, table);
    const others = versioned<Account>(ground.other, table);
    const [callers, all] = [20, new TestGate()];
    let runs = 0;
    const take = (id: number) =>
      rows.update(id, async ({ balance }) => {
        // Nobody writes before everybody has read.
        if (++runs === callers) all.open();
        await all.opened;
        return { balance: Number(balance) - 1 };
      });
    await Promise.all(Array.from({ length: callers }, () => take(1)));
    // One was the first; each of the others has decided in vain once, and not again.
    assert.deepEqual([runs, ...numbers((await rows.read(1)) as Account)], [2 * callers - 1, 80, 20]);
    // Those of other instances and processes stand in no line of ours.
    const give = async () => void (await others.update(1, (row) => ({ balance: Number(row.balance) + 1 })));
    await Promise.all([...Array.from({ length: 10 }, () => take(1)), ...Array.from({ length: 3 }, give)]);
    assert.deepEqual(numbers((await rows.read(1)) as Account), [73, 33]);
    // Several rows: some of them the same, and none waited for by two in different orders.
    const move = (from: number, to: number) =>
      rows.updateAll([from, to], ([a, b]) => [
        { balance: Number(a?.balance) - 1 },
        { balance: Number(b?.balance) + 1 },
      ]);
    await Promise.all([move(1, 2), move(2, 3), move(3, 1), move(2, 1), take(2), take(3)]);
    const now = await Promise.all([1, 2, 3].map(async (id) => Number((await rows.read(id))?.balance)));
    assert.deepEqual(now, [74, 98, 99]);
  }),

  "gives up with both versions": versionCase(async (ground) => {
    const table = await accounts(ground);
    const rows = versioned<Account>(ground.hf, table);
    const others = versioned<Account>(ground.other, table);
    const collide = () =>
      rows.update(
        1,
        async () => {
          await others.update(1, (theirs) => ({ balance: Number(theirs.balance) + 1 }));
          return { balance: 0 };
        },
        { attempts: 3 },
      );
    await assert.rejects(collide(), (error: unknown) => {
      assert.ok(error instanceof StaleVersionError, String(error));
      assert.deepEqual(
        [Number(error.expected), Number(error.found), error.key, error.retryable],
        [2, 3, 1, true],
      );
      return true;
    });
    assert.deepEqual(numbers((await rows.read(1)) as Account), [103, 3]);
    await assert.rejects(
      rows.update(2, async () => {
        await execute(ground.site, sql`DELETE FROM ${sql.id(table)} WHERE id = ${2}`);
        return { balance: 0 };
      }),
      (error: unknown) => error instanceof StaleVersionError && error.found === undefined,
    );
  }),

  "takes part in a transaction": versionCase(async (ground) => {
    const { hf } = ground;
    const table = await accounts(ground);
    const rows = versioned<Account>(hf, table);
    await assert.rejects(
      hf.transaction(async (tx) => {
        await rows.update(1, () => ({ balance: 1 }), { tx });
        assert.deepEqual(numbers((await rows.read(1, { tx })) as Account), [1, 1]);
        throw new Error("undo");
      }),
      /undo/,
    );
    assert.deepEqual(numbers((await rows.read(1)) as Account), [100, 0]);
    await hf.transaction((tx) => rows.updateAll([2, 1], () => [{ balance: 2 }, { balance: 1 }], { tx }));
    assert.deepEqual(numbers((await rows.read(2)) as Account), [2, 1]);
  }),

  "writes several rows or none": versionCase(async (ground) => {
    const table = await accounts(ground);
    const rows = versioned<Account>(ground.hf, table);
    const others = versioned<Account>(ground.other, table);
    let runs = 0;
    const [to, from] = await rows.updateAll([2, 1], async ([a, b]) => {
      if (++runs === 1) await others.update(1, () => ({ balance: 50 }));
      return [{ balance: Number(a?.balance) + 5 }, { balance: Number(b?.balance) - 5 }];
    });
    assert.deepEqual([runs, ...numbers(to as Account), ...numbers(from as Account)], [2, 105, 1, 45, 2]);
    await assert.rejects(
      rows.updateAll(
        [2, 1],
        async () => {
          await others.update(1, () => ({ note: "x" }));
          return [{ balance: 0 }, { balance: 0 }];
        },
        { attempts: 2 },
      ),
      StaleVersionError,
    );
    assert.deepEqual(numbers((await rows.read(2)) as Account), [105, 1]);
    await assert.rejects(
      rows.updateAll([1, 9], () => [{}, {}]),
      RowsMissingError,
    );
    await assert.rejects(
      rows.updateAll([1, 2], () => [{}]),
      UsageError,
    );
    assert.deepEqual(await rows.updateAll([], () => []), []);
  }),

  "does slow work without a lock, and looks again before it writes": versionCase(async (ground) => {
    const { hf, other } = ground;
    const table = await accounts(ground);
    const rows = versioned<Account>(hf, table);
    const others = versioned<Account>(other, table);
    let calls = 0;
    const row = await rows.updateAfter(
      1,
      async ({ balance }) => {
        // Nothing is locked meanwhile: somebody else can write.
        if (++calls === 1) await others.update(1, () => ({ balance: 500 }));
        return Number(balance) > 200 ? "review" : "fine";
      },
      async (now, verdict, tx) => {
        await tx.query(sql`UPDATE ${sql.id(table)} SET balance = ${1} WHERE id = ${3}`);
        return { note: `${verdict} at ${Number(now.balance)}` };
      },
    );
    assert.deepEqual([calls, row.note, ...numbers(row)], [2, "review at 500", 500, 2]);
    assert.equal(Number((await rows.read(3))?.balance), 1);
    await assert.rejects(
      rows.updateAfter(
        2,
        async () => others.update(2, () => ({ note: "again" })),
        () => ({ balance: 0 }),
      ),
      StaleVersionError,
    );
    assert.equal(Number((await rows.read(2))?.balance), 100);
  }),

  "refuses what cannot be meant": versionCase(async (ground) => {
    const table = await accounts(ground);
    const { hf } = ground;
    const rows = versioned<Account>(hf, table);
    await assert.rejects(
      rows.update(1, () => ({ version: 7 })),
      UsageError,
    );
    await assert.rejects(
      rows.update(1, () => ({ blance: 7 }) as never),
      UsageError,
    );
    await assert.rejects(
      rows.update(undefined as never, () => ({})),
      UsageError,
    );
    await assert.rejects(
      rows.update(1, () => 7 as never),
      UsageError,
    );
    await assert.rejects(
      rows.update(1, () => ({}), { attempts: 0 }),
      UsageError,
    );
    await assert.rejects(
      rows.update(1, () => ({}), { atempts: 1 } as never),
      UsageError,
    );
    await assert.rejects(
      versioned(hf, table, { version: "vrsion" }).update(1, () => ({})),
      /vrsion/,
    );
    assert.throws(() => versioned({} as never, table), UsageError);
    assert.throws(() => versioned(hf, ""), UsageError);
  }),
});
