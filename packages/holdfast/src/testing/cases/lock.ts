import { isSupported } from "../../seam/capabilities.ts";
import { FileBusyError, LockNotAvailableError, LockTimeoutError, UsageError } from "../../seam/errors.ts";
import { key, shared } from "../../seam/key.ts";
import { once } from "../../index.ts";
import { assert, during, nested, refusal, sql, suite, table, where } from "./support.ts";

export const lockCases = suite("lock", {
  "lets one in at a time, across instances": async ({ hf, other, fresh }) => {
    let inside = 0;
    let most = 0;
    const enter = (instance: typeof hf) =>
      instance.transaction({ lock: key("one", fresh), wait: 60_000 }, async () => {
        most = Math.max(most, ++inside);
        await new Promise((resolve) => setTimeout(resolve, 1));
        inside--;
      });
    await Promise.all(Array.from({ length: 20 }, (_, i) => enter(i % 2 ? hf : other)));
    assert.equal(most, 1);
  },

  "makes check-then-write exact": async (ground) => {
    const { hf, other, fresh } = ground;
    const name = await table(ground);
    const consume = (instance: typeof hf) =>
      instance.transaction({ lock: key("quota", fresh), wait: 60_000 }, async (tx) => {
        const [row] = await tx.query(sql`SELECT count(*) AS n FROM ${sql.id(name)}`);
        if (Number(row?.n) >= 10) return false;
        await tx.query(sql`INSERT INTO ${sql.id(name)} (k, n) VALUES ('u', 1)`);
        return true;
      });
    const granted = await Promise.all(Array.from({ length: 40 }, (_, i) => consume(i % 2 ? hf : other)));
    assert.equal(granted.filter(Boolean).length, 10);
    const [row] = await hf.transaction((tx) => tx.query(sql`SELECT count(*) AS n FROM ${sql.id(name)}`));
    assert.equal(Number(row?.n), 10);
  },

  "gives up after its wait, and says what it waited for and who held it": async ({
    hf,
    other,
    fresh,
    capabilities,
  }) => {
    const lock = key("busy", fresh);
    const told = isSupported(capabilities.holders) && capabilities.connections === "many";
    const error = await during(
      (inside) => hf.transaction({ lock }, inside),
      () =>
        refusal(
          () =>
            other
              .transaction({ lock, wait: 200 }, async () => assert.fail("entered"))
              .catch((e: unknown) => e),
          told,
        ),
    );
    assert.ok(error instanceof LockTimeoutError, String(error));
    assert.equal(error.code, "HF_LOCK_TIMEOUT");
    assert.ok(error.retryable);
    assert.deepEqual(error.keys, [lock.name]);
    assert.match(error.message, new RegExp(fresh));
    if (told) {
      assert.equal(error.holders.length, 1);
      assert.match(error.message, /Held by pid \d+ .*busy/);
    }
    // The lock is free again, for both.
    await other.transaction({ lock, wait: 5000 }, async () => {});
    await hf.transaction({ lock, wait: "nowait" }, async () => {});
  },

  "does not wait with nowait and tryLock": async ({ hf, other, fresh }) => {
    const lock = key("try", fresh);
    await during(
      (inside) => hf.transaction({ lock }, inside),
      async () => {
        await assert.rejects(
          other.transaction({ lock, wait: "nowait" }, async () => assert.fail("entered")),
          LockNotAvailableError,
        );
        assert.deepEqual(await other.tryLock(lock, async () => assert.fail("entered")), { acquired: false });
      },
    );
    assert.deepEqual(await other.tryLock(lock, async () => 7), { acquired: true, value: 7 });
    // The body's own refusal of something else is not an answer about this lock.
    const own = new LockNotAvailableError({ keys: ["x"], holders: [] });
    await assert.rejects(
      other.tryLock(lock, async () => {
        throw own;
      }),
      (e) => e === own,
    );
  },

  "does not make one key wait for another": async ({ hf, other, fresh, capabilities }) => {
    if (capabilities.granularity === "database") {
      // Declared: then even an unrelated key must wait, and must not slip through.
      await during(
        (inside) => hf.transaction({ lock: key("a", fresh) }, inside),
        async () => {
          let entered = false;
          const second = other.transaction(
            { lock: key("b", fresh), wait: 60_000 },
            async () => (entered = true),
          );
          await new Promise((resolve) => setTimeout(resolve, 50));
          assert.equal(entered, false);
          void second.catch(() => {});
        },
      );
      return;
    }
    await during(
      (inside) => hf.transaction({ lock: key("a", fresh) }, inside),
      () =>
        other.transaction({ lock: [key("b", fresh), key("a", fresh, "x")], wait: "nowait" }, async () => {}),
    );
  },

  "is not called taken because somebody else writes": async ({ hf, other, fresh, capabilities }) => {
    if (capabilities.connections === "one") return;
    const whole = capabilities.granularity === "database";
    const answered = async <T>(call: Promise<T>, answer: (value: T) => unknown) => {
      // Whether it is free cannot be found out: that is told, and nothing else.
      if (whole) await assert.rejects(call, FileBusyError);
      else assert.ok(await answer(await call));
    };
    await during(
      (inside) => hf.transaction({ lock: key("theirs", fresh) }, inside),
      async () => {
        await answered(
          other.tryLock(key("mine", fresh), async () => 7),
          (ran) => ran.acquired && ran.value === 7,
        );
        if (isSupported(capabilities.once))
          await answered(
            once(other, ["mine", fresh], async () => 7, { wait: "skip" }),
            ({ status }) => status === "done",
          );
        if (isSupported(capabilities.leases))
          await answered(other.lease(key("lease", fresh), { wait: "skip" }), async (lease) => {
            await lease?.release();
            return lease !== undefined;
          });
      },
    );
  },

  "takes many keys in one order, so that nobody deadlocks": async ({ hf, other, fresh }) => {
    const [a, b, c] = ["a", "b", "c"].map((k) => key("order", fresh, k)) as [
      ReturnType<typeof key>,
      ReturnType<typeof key>,
      ReturnType<typeof key>,
    ];
    let runs = 0;
    const loop = async (instance: typeof hf, lock: ReturnType<typeof key>[]) => {
      for (let i = 0; i < 15; i++) {
        await instance.transaction({ lock, retry: false, wait: 60_000 }, async () => {
          runs++;
        });
      }
    };
    await Promise.all([loop(hf, [a, b, c]), loop(other, [c, b, a]), loop(hf, [b, a]), loop(other, [a, c])]);
    assert.equal(runs, 60);
  },

  "is re-entrant within its transaction": async ({ hf, other, fresh }) => {
    const lock = key("again", fresh);
    await hf.transaction({ lock, wait: "nowait" }, async (tx) => {
      assert.ok(tx.holds(lock));
      await tx.lock(lock, { wait: "nowait" });
      assert.equal(await tx.tryLock(lock), true);
      await hf.lock(lock, async (inner) => assert.ok(inner.holds(lock)), { wait: "nowait" });
      assert.deepEqual(await hf.tryLock(lock, async () => 1), { acquired: true, value: 1 });
    });
    await other.transaction({ lock, wait: 5000 }, async () => {});
  },

  "forgets a lock that was taken in a savepoint that was rolled back": nested(
    async ({ hf, other, fresh, capabilities }) => {
      const lock = key("savepoint", fresh);
      await hf.transaction(async (tx) => {
        await assert.rejects(
          tx.transaction({ lock }, async (inner) => {
            assert.ok(inner.holds(lock));
            throw new Error("undo");
          }),
          /undo/,
        );
        assert.equal(tx.holds(lock), false);
        await tx.lock(lock);
        assert.ok(tx.holds(lock));
        if (capabilities.granularity === "key")
          assert.deepEqual(await other.tryLock(lock, async () => 1), { acquired: false });
      });
      await other.transaction({ lock, wait: 5000 }, async () => {});
    },
  ),

  "keeps a lock that was taken in a savepoint that was kept": async ({ hf, other, fresh, capabilities }) => {
    const lock = key("kept", fresh);
    await hf.transaction(async (tx) => {
      await tx.transaction({ lock }, async () => {});
      assert.ok(tx.holds(lock));
      if (capabilities.connections === "many")
        assert.deepEqual(await other.tryLock(lock, async () => 1), { acquired: false });
    });
  },

  "goes on after a lock in mid-transaction was not to be had": async (ground) => {
    const { hf, other, fresh, capabilities } = ground;
    if (capabilities.granularity === "database") return;
    const name = await table(ground);
    const [own, theirs] = [key("own", fresh), key("theirs", fresh)];
    await during(
      (inside) => hf.transaction({ lock: theirs }, inside),
      async () => {
        const goOn = other.transaction({ lock: own }, async (tx) => {
          assert.equal(await tx.tryLock([key("free", fresh), theirs]), false);
          assert.equal(tx.holds(key("free", fresh)), false);
          await assert.rejects(tx.lock(theirs, { wait: 100 }), LockTimeoutError);
          assert.equal(tx.holds(theirs), false);
          await tx.query(sql`INSERT INTO ${sql.id(name)} (k, n) VALUES ('after', 1)`);
        });
        await goOn;
      },
    );
    const [row] = await hf.transaction((tx) => tx.query(sql`SELECT count(*) AS n FROM ${sql.id(name)}`));
    assert.equal(Number(row?.n), 1);
  },

  "shares a key among sharers, and not with others": where(
    ({ capabilities }) => capabilities.sharedLocks,
    async ({ hf, other, fresh, capabilities }) => {
      const lock = key("shared", fresh);
      if (capabilities.connections === "one")
        return hf.transaction({ lock: shared(lock) }, async (tx) => assert.ok(tx.holds(shared(lock))));
      await during(
        (inside) => hf.transaction({ lock: shared(lock) }, inside),
        async () => {
          await other.transaction({ lock: shared(lock), wait: "nowait" }, async (tx) => {
            assert.ok(tx.holds(shared(lock)));
            assert.equal(tx.holds(lock), false);
          });
          assert.deepEqual(await other.tryLock(lock, async () => 1), { acquired: false });
        },
      );
      await during(
        (inside) => hf.transaction({ lock }, inside),
        async () => assert.deepEqual(await other.tryLock(shared(lock), async () => 1), { acquired: false }),
      );
    },
    ({ hf, fresh }) => hf.transaction({ lock: shared(key("shared", fresh)) }, async () => {}),
  ),

  "takes keys of any content": async ({ hf, other, fresh, capabilities }) => {
    const nasty = [
      "'; DROP TABLE x; --",
      "*/",
      "\0",
      "\\",
      '"',
      "`",
      "%s$1?",
      "😀".repeat(50),
      "x".repeat(10_000),
      "\n\r\t",
      "ünïcödé",
    ];
    for (const content of nasty) {
      const lock = key("nasty", fresh, content);
      await during(
        (inside) => hf.transaction({ lock }, inside),
        async () => {
          assert.deepEqual(await other.tryLock(lock, async () => 1), { acquired: false });
          if (capabilities.granularity === "key")
            assert.equal(
              (await other.tryLock(key("nasty", fresh, `${content}!`), async () => 1)).acquired,
              true,
            );
        },
      );
    }
  },

  "refuses what cannot be right before it reaches the server": async ({ hf }) => {
    const bad: [string, () => Promise<unknown>][] = [
      ["a string for a key", () => hf.lock("nightly" as never, async () => {})],
      ["no key", () => hf.lock([], async () => {})],
      ["NaN", () => hf.transaction({ lock: key("a"), wait: Number.NaN }, async () => {})],
      ["a negative wait", () => hf.transaction({ lock: key("a"), wait: -1 }, async () => {})],
      ["an endless wait", () => hf.transaction({ lock: key("a"), wait: Infinity }, async () => {})],
      ["an unknown word", () => hf.transaction({ lock: key("a"), wait: "later" as never }, async () => {})],
      ["an unknown option", () => hf.transaction({ locks: key("a") } as never, async () => {})],
      ["an unknown isolation", () => hf.transaction({ isolation: "chaos" as never }, async () => {})],
      ["no body", () => hf.transaction({}, undefined as never)],
      ["a deadline of 0", () => hf.transaction({ deadline: 0 }, async () => {})],
      ["retry attempts of 0", () => hf.transaction({ retry: { attempts: 0 } }, async () => {})],
    ];
    for (const [what, call] of bad) await assert.rejects(call, UsageError, what);
  },
});
