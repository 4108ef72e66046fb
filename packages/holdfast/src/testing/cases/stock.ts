/** Stock: every rule of what it decides, by example, and that it is exact when many come at once. */
import { isSupported } from "../../seam/capabilities.ts";
import {
  HoldfastError,
  LockTimeoutError,
  SerializationError,
  UnsupportedError,
  UsageError,
} from "../../seam/errors.ts";
import {
  InsufficientStockError,
  type Line,
  type Stock,
  StockConflictError,
  UnknownSkuError,
  stock,
  stocks,
} from "../../stock/index.ts";
import type { ConformanceCase, Ground } from "../ground.ts";
import { assert, during, suite } from "./support.ts";

interface Shop extends Ground {
  readonly shop: Stock;
  /** The same stock, by another instance. */
  readonly also: Stock;
}

/** Where it is kept, with so many of each at "main"; elsewhere it is refused. */
function shopCase(
  levels: Readonly<Record<string, number>>,
  run: (shop: Shop) => Promise<void>,
): ConformanceCase["run"] {
  return async (ground) => {
    const { hf, other, fresh, capabilities } = ground;
    const [shop, also] = [stock(hf, { name: fresh }), stock(other, { name: fresh })];
    if (!isSupported(capabilities.stock)) {
      await assert.rejects(shop.increase("CAP", 1), UnsupportedError);
      return;
    }
    const lines = Object.entries(levels).map(([sku, quantity]) => ({ sku, quantity }));
    if (lines.length > 0) await shop.apply(lines);
    await run({ ...ground, shop, also });
    const { ok, findings } = await also.reconcile();
    assert.ok(ok, findings.map(({ text }) => text).join("; "));
  };
}

const take = (sku: string, quantity = 1): Line => ({ sku, quantity: -quantity });

async function onHand(shop: Stock): Promise<Record<string, number>> {
  const levels = await shop.levels();
  return Object.fromEntries(
    levels.map(({ sku, location, onHand: n }) => [location === "main" ? sku : `${sku} ${location}`, n]),
  );
}

const code = (expected: string) => (error: unknown) => {
  assert.ok(error instanceof HoldfastError, String(error));
  assert.equal(error.code, expected);
  return true;
};

/** Until others are no longer in the way of what was reserved for a moment. */
async function isOver(shop: Stock, sku: string): Promise<void> {
  for (const until = performance.now() + 60_000; performance.now() < until;) {
    if ((await shop.level(sku)).reserved === 0) return;
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
  assert.fail("a reservation of a millisecond does not end");
}

/** How many came through; whoever did not was told that there was too little. */
async function taken(calls: readonly (() => Promise<unknown>)[]): Promise<number> {
  const answers = await Promise.all(
    calls.map((call) =>
      call().then(
        () => 1,
        (error: unknown) => {
          assert.ok(error instanceof InsufficientStockError, String(error));
          return 0;
        },
      ),
    ),
  );
  return answers.reduce<number>((sum, n) => sum + n, 0);
}

const orders: Readonly<Record<string, ConformanceCase["run"]>> = {
  "an order is taken whole, and each line says what is left": shopCase(
    { CAP: 5, MUG: 3 },
    async ({ shop }) => {
      const done = await shop.apply([take("MUG"), take("CAP", 2)], {
        source: "ORDER",
        reference: { type: "order", id: "1001" },
        by: "ada",
        note: "gift",
      });
      assert.equal(done.replayed, false);
      assert.deepEqual(done.lines, [
        { sku: "CAP", location: "main", quantity: -2, onHand: 3, version: 2 },
        { sku: "MUG", location: "main", quantity: -1, onHand: 2, version: 2 },
      ]);
      const { movements } = await shop.history({ reference: { id: "1001" } });
      const said = movements.map(({ sku, quantity, balance, source, by, note, kind }) =>
        [sku, quantity, balance, source, by, note, kind].join(),
      );
      assert.deepEqual(said.toSorted(), ["CAP,-2,3,ORDER,ada,gift,apply", "MUG,-1,2,ORDER,ada,gift,apply"]);
    },
  ),

  "an order that does not fit is refused whole, with every line that is short": shopCase(
    { CAP: 5, MUG: 1, TEE: 3 },
    async ({ shop }) => {
      await assert.rejects(shop.apply([take("CAP"), take("TEE", 4), take("MUG", 3)]), (error: unknown) => {
        assert.ok(error instanceof InsufficientStockError);
        assert.deepEqual(error.lines, [
          { sku: "MUG", location: "main", requested: 3, available: 1, short: 2 },
          { sku: "TEE", location: "main", requested: 4, available: 3, short: 1 },
        ]);
        return true;
      });
      assert.deepEqual(await onHand(shop), { CAP: 5, MUG: 1, TEE: 3 });
    },
  ),

  "lines of one SKU are summed before they are checked": shopCase({ CAP: 5 }, async ({ shop }) => {
    await assert.rejects(shop.apply([take("CAP", 3), take("CAP", 3)]), InsufficientStockError);
    const { lines } = await shop.apply([take("CAP", 3), { sku: "CAP", quantity: 1 }, take("CAP", 3)]);
    assert.deepEqual(lines, [{ sku: "CAP", location: "main", quantity: -5, onHand: 0, version: 2 }]);
  }),

  "a level begins with what is put into it; before that the SKU is unknown": shopCase(
    { CAP: 1 },
    async ({ shop }) => {
      for (const call of [
        () => shop.decrease("MUG", 1),
        () => shop.apply([take("CAP"), take("MUG")]),
        () => shop.reserve([{ sku: "MUG", quantity: 1 }]),
        () => shop.level("MUG"),
        () => shop.decrease("CAP", 1, { location: "north" }),
      ])
        await assert.rejects(call, UnknownSkuError);
      await shop.adjustTo("MUG", 4);
      await shop.setMinimum("TEE", -2);
      await shop.decrease("TEE", 2);
      assert.deepEqual(await onHand(shop), { CAP: 1, MUG: 4, TEE: -2 });
    },
  ),

  "what has to stay stays, and below 0 it is backorder": shopCase({ CAP: 5 }, async ({ shop }) => {
    await shop.setMinimum("CAP", 2);
    await assert.rejects(shop.decrease("CAP", 4), InsufficientStockError);
    await shop.decrease("CAP", 3);
    assert.equal((await shop.level("CAP")).available, 0);
    await assert.rejects(shop.setMinimum("CAP", 3), InsufficientStockError);
    await shop.setMinimum("CAP", -3);
    await shop.decrease("CAP", 5);
    await assert.rejects(shop.decrease("CAP", 1), InsufficientStockError);
    const { onHand: n, min, available } = await shop.level("CAP");
    assert.deepEqual([n, min, available], [-3, -3, 0]);
  }),

  "what was counted is a movement of the difference": shopCase({ CAP: 5 }, async ({ shop }) => {
    const { lines } = await shop.adjustTo("CAP", 2, { externalId: "count" });
    assert.deepEqual(lines, [{ sku: "CAP", location: "main", quantity: -3, onHand: 2, version: 2 }]);
    await shop.increase("CAP", 7);
    // The same count again is the same movement, whatever came after it.
    const again = await shop.adjustTo("CAP", 2, { externalId: "count" });
    assert.deepEqual([again.replayed, again.lines], [true, lines]);
    await shop.reserve([{ sku: "CAP", quantity: 4 }]);
    await assert.rejects(shop.adjustTo("CAP", 3), InsufficientStockError);
    await shop.adjustTo("CAP", 4);
  }),

  "a transfer takes here and adds there, or neither": shopCase({ CAP: 5 }, async ({ shop }) => {
    await shop.transfer("CAP", 3, { from: "main", to: "north", externalId: "t" });
    await assert.rejects(shop.transfer("CAP", 3, { from: "main", to: "north" }), InsufficientStockError);
    const again = await shop.transfer("CAP", 3, { from: "main", to: "north", externalId: "t" });
    assert.equal(again.replayed, true);
    assert.deepEqual(await onHand(shop), { CAP: 2, "CAP north": 3 });
    await assert.rejects(
      shop.transfer("CAP", 3, { from: "north", to: "main", externalId: "t" }),
      StockConflictError,
    );
  }),

  "more than can be counted is refused": shopCase({ CAP: 1 }, async ({ shop }) => {
    await assert.rejects(shop.increase("CAP", Number.MAX_SAFE_INTEGER), UsageError);
    await shop.increase("CAP", Number.MAX_SAFE_INTEGER - 1);
    await shop.decrease("CAP", Number.MAX_SAFE_INTEGER);
    assert.deepEqual(await onHand(shop), { CAP: 0 });
  }),

  "names are told apart to the letter": shopCase({}, async ({ shop }) => {
    const names = ["cap", "CAP", "cap ", "çap", "cäp", `it's "quoted" \\ 😀`, "％", "%"];
    for (const [i, sku] of names.entries())
      await shop.increase(sku, i + 1, { externalId: sku, location: sku });
    const levels = await shop.levels();
    assert.deepEqual(
      new Map(levels.map(({ sku, location, onHand: n }) => [`${sku} at ${location}`, n])),
      new Map(names.map((sku, i) => [`${sku} at ${sku}`, i + 1])),
    );
    await assert.rejects(shop.decrease("Cap", 1, { location: "cap" }), UnknownSkuError);
    const { movements } = await shop.history({ sku: "cap " });
    assert.deepEqual(
      movements.map(({ externalId, quantity }) => [externalId, quantity]),
      [["cap ", 3]],
    );
  }),

  "an order of many lines": shopCase({}, async ({ shop }) => {
    const name = (i: number) => `sku ${i}`;
    const many = Array.from({ length: 520 }, (_, i) => ({ sku: name(i), quantity: 2 }));
    await shop.apply(many);
    await assert.rejects(
      shop.apply([...many.map(({ sku }) => take(sku)), take(name(510), 2)]),
      InsufficientStockError,
    );
    const done = await shop.apply(
      many.map(({ sku }) => take(sku)),
      { externalId: "many" },
    );
    assert.equal(done.lines.length, many.length);
    const again = await shop.apply(
      many.map(({ sku }) => take(sku)),
      { externalId: "many" },
    );
    assert.deepEqual([again.replayed, again.lines], [true, done.lines]);
    assert.ok((await shop.levels()).every((level) => level.onHand === 1));
  }),
};

const ids: Readonly<Record<string, ConformanceCase["run"]>> = {
  "an id is applied once, and answered again with the answer of then": shopCase(
    { CAP: 3, MUG: 3 },
    async ({ shop, also }) => {
      const lines = [take("CAP", 2), take("MUG")];
      const first = await shop.apply(lines, { externalId: "webhook", source: "ML_SALE" });
      // Also when nothing is left, and in whatever order they are written.
      await shop.decrease("CAP", 1);
      const again = await also.apply(lines.toReversed(), { externalId: "webhook", source: "ML_SALE" });
      assert.deepEqual(again, { ...first, replayed: true });
      assert.deepEqual(await onHand(shop), { CAP: 0, MUG: 2 });
    },
  ),

  "an id with other content is refused": shopCase({ CAP: 9, MUG: 9 }, async ({ shop }) => {
    const about = { externalId: "id", source: "ORDER", reference: { type: "order", id: "1" } } as const;
    await shop.apply([take("CAP", 2)], about);
    const before = await onHand(shop);
    for (const [lines, other] of [
      [[take("CAP", 3)], about],
      [[take("CAP", 2), take("MUG")], about],
      [[take("CAP", 2)], { ...about, source: "MANUAL" }],
      [[take("CAP", 2)], { ...about, reference: { type: "order", id: "2" } }],
      [[take("CAP", 2)], { ...about, reference: { type: "receipt", id: "1" } }],
      [[take("CAP", 2)], { externalId: "id", source: "ORDER" }],
    ] as const)
      await assert.rejects(shop.apply(lines, other), StockConflictError);
    await assert.rejects(shop.adjustTo("CAP", 7, { ...about }), StockConflictError);
    assert.deepEqual(await onHand(shop), before);
    // Who did it, and why, is not what it is.
    assert.equal((await shop.apply([take("CAP", 2)], { ...about, by: "ada", note: "again" })).replayed, true);
  }),

  "an id counts per SKU and location, and a refusal is not kept": shopCase(
    { CAP: 1, MUG: 5 },
    async ({ shop }) => {
      await assert.rejects(shop.apply([take("CAP", 2)], { externalId: "id" }), InsufficientStockError);
      await shop.apply([take("MUG")], { externalId: "id" });
      await shop.increase("CAP", 1);
      assert.equal((await shop.apply([take("CAP", 2)], { externalId: "id" })).replayed, false);
      assert.equal((await shop.apply([take("MUG")], { externalId: "id" })).replayed, true);
      assert.deepEqual(await onHand(shop), { CAP: 0, MUG: 4 });
    },
  ),

  "an id from many callers at once is applied once": shopCase({ CAP: 3, MUG: 3 }, async ({ shop, also }) => {
    const answers = await Promise.all(
      Array.from({ length: 16 }, (_, i) =>
        (i % 2 ? shop : also).apply([take("CAP", 2), take("MUG", 2)], { externalId: "rush" }),
      ),
    );
    assert.equal(answers.filter(({ replayed }) => !replayed).length, 1);
    for (const { lines } of answers) assert.deepEqual(lines, answers[0]?.lines);
    assert.deepEqual(await onHand(shop), { CAP: 1, MUG: 1 });
  }),
};

const reservations: Readonly<Record<string, ConformanceCase["run"]>> = {
  "what is reserved is kept apart until it is taken": shopCase({ CAP: 5, MUG: 5 }, async ({ shop, also }) => {
    const lines = [
      { sku: "CAP", quantity: 3 },
      { sku: "MUG", quantity: 1 },
    ];
    const kept = await shop.reserve(lines, { id: "cart", by: "ada", reference: { type: "cart", id: "7" } });
    assert.deepEqual([kept.state, kept.replayed], ["open", false]);
    await assert.rejects(also.decrease("CAP", 3), InsufficientStockError);
    await assert.rejects(also.reserve([{ sku: "CAP", quantity: 3 }]), InsufficientStockError);
    const { reserved, available } = await also.level("CAP");
    assert.deepEqual([reserved, available], [3, 2]);
    const same = await also.reserve(lines, { id: "cart" });
    assert.deepEqual([same.replayed, same.until], [true, kept.until]);
    const done = await also.commit("cart", { by: "bob" });
    assert.equal(done.externalId, "commit:cart");
    assert.deepEqual(await kept.commit(), { ...done, replayed: true });
    assert.deepEqual(await onHand(shop), { CAP: 2, MUG: 4 });
    // What commit does not say is as it was reserved.
    const { movements } = await shop.history({ sku: "CAP", limit: 1 });
    assert.deepEqual(
      movements.map(({ kind, by, source, reference }) => [kind, by, source, reference]),
      [["commit", "bob", "ORDER", { type: "cart", id: "7" }]],
    );
    assert.deepEqual([(await also.reserve(lines, { id: "cart" })).state], ["committed"]);
    await assert.rejects(kept.release(), code("HF_STOCK_RESERVATION_ENDED"));
  }),

  "what is released is free again": shopCase({ CAP: 5 }, async ({ shop }) => {
    const kept = await shop.reserve([{ sku: "CAP", quantity: 5 }], { id: "cart" });
    await kept.release();
    await kept.release();
    await shop.decrease("CAP", 5);
    await assert.rejects(kept.commit(), code("HF_STOCK_RESERVATION_ENDED"));
    await assert.rejects(
      shop.reserve([{ sku: "CAP", quantity: 5 }], { id: "cart" }),
      code("HF_STOCK_RESERVATION_ENDED"),
    );
  }),

  "what has run out makes room, and may be reserved again": shopCase({ CAP: 5 }, async ({ shop, also }) => {
    const lines = [{ sku: "CAP", quantity: 5 }];
    const kept = await shop.reserve(lines, { id: "cart", ttl: 1 });
    await isOver(shop, "CAP");
    await assert.rejects(kept.commit(), code("HF_STOCK_RESERVATION_ENDED"));
    const again = await also.reserve(lines, { id: "cart" });
    assert.deepEqual([again.replayed, again.state], [false, "open"]);
    await again.release();
    const other = await shop.reserve(lines, { id: "other", ttl: 1 });
    await isOver(shop, "CAP");
    await also.decrease("CAP", 4);
    // It may be given back; there is nothing left of it.
    await other.release();
    await assert.rejects(shop.reserve(lines, { id: "cart2" }), InsufficientStockError);
    await shop.setMinimum("CAP", 1);
    assert.deepEqual(await onHand(shop), { CAP: 1 });
  }),

  "a minimum clears away what has run out, too": shopCase({ CAP: 5 }, async ({ shop }) => {
    await shop.reserve([{ sku: "CAP", quantity: 5 }], { ttl: 1 });
    await isOver(shop, "CAP");
    await shop.setMinimum("CAP", 5);
    await assert.rejects(shop.decrease("CAP", 1), InsufficientStockError);
  }),

  "a reservation of other lines is refused, and one that is not there": shopCase(
    { CAP: 5, MUG: 5 },
    async ({ shop }) => {
      await shop.reserve([{ sku: "CAP", quantity: 1 }], { id: "cart" });
      for (const lines of [
        [{ sku: "CAP", quantity: 2 }],
        [{ sku: "MUG", quantity: 1 }],
        [
          { sku: "CAP", quantity: 1 },
          { sku: "MUG", quantity: 1 },
        ],
      ])
        await assert.rejects(shop.reserve(lines, { id: "cart" }), StockConflictError);
      await assert.rejects(shop.commit("nowhere"), code("HF_STOCK_UNKNOWN"));
      await assert.rejects(shop.release("nowhere"), code("HF_STOCK_UNKNOWN"));
      assert.equal((await shop.level("MUG")).reserved, 0);
    },
  ),

  "a reservation that many make and take is made and taken once": shopCase(
    { CAP: 5 },
    async ({ shop, also }) => {
      const both = [shop, also];
      const lines = [{ sku: "CAP", quantity: 2 }];
      const made = await Promise.all(
        Array.from({ length: 8 }, (_, i) => (both[i % 2] as Stock).reserve(lines, { id: "cart" })),
      );
      assert.equal(made.filter(({ replayed }) => !replayed).length, 1);
      const done = await Promise.all(
        Array.from({ length: 8 }, (_, i) => (both[i % 2] as Stock).commit("cart")),
      );
      assert.equal(done.filter(({ replayed }) => !replayed).length, 1);
      assert.deepEqual(await onHand(shop), { CAP: 3 });
    },
  ),
};

const returns: Readonly<Record<string, ConformanceCase["run"]>> = {
  "what was sold comes back, never more than that": shopCase({ CAP: 9, MUG: 9 }, async ({ shop }) => {
    await shop.apply([take("CAP", 5), take("MUG", 2)], { externalId: "sale" });
    await shop.return("sale", { lines: [{ sku: "CAP", quantity: 2 }], externalId: "first" });
    await assert.rejects(
      shop.return("sale", { lines: [{ sku: "CAP", quantity: 4 }] }),
      code("HF_STOCK_TOO_MUCH"),
    );
    await assert.rejects(shop.return("sale", { lines: [{ sku: "TEE", quantity: 1 }] }), UnknownSkuError);
    const rest = await shop.return("sale");
    assert.deepEqual(
      rest.lines.map(({ sku, quantity }) => [sku, quantity]),
      [
        ["CAP", 3],
        ["MUG", 2],
      ],
    );
    assert.deepEqual(await shop.return("sale"), { ...rest, replayed: true });
    const first = await shop.return("sale", { lines: [{ sku: "CAP", quantity: 2 }], externalId: "first" });
    assert.equal(first.replayed, true);
    await assert.rejects(shop.return("sale", { externalId: "again" }), code("HF_STOCK_TOO_MUCH"));
    assert.deepEqual(await onHand(shop), { CAP: 9, MUG: 9 });
  }),

  "only what was sold comes back": shopCase({ CAP: 9, MUG: 1 }, async ({ shop }) => {
    await shop.adjustTo("CAP", 5, { externalId: "count" });
    await shop.increase("CAP", 1, { externalId: "restock" });
    for (const id of ["count", "restock", "nowhere"])
      await assert.rejects(shop.return(id), code("HF_STOCK_UNKNOWN"));
    await shop.decrease("CAP", 1, { externalId: "sale" });
    await assert.rejects(
      shop.return("sale", { lines: [{ sku: "MUG", quantity: 1 }] }),
      code("HF_STOCK_UNKNOWN"),
    );
    const kept = await shop.reserve([{ sku: "CAP", quantity: 2 }], { id: "cart" });
    await assert.rejects(shop.return("cart"), code("HF_STOCK_UNKNOWN"));
    const { externalId } = await kept.commit();
    await shop.return(externalId);
    assert.deepEqual(await onHand(shop), { CAP: 5, MUG: 1 });
  }),

  "of many who return the same, one does": shopCase({ CAP: 9 }, async ({ shop, also }) => {
    await shop.decrease("CAP", 6, { externalId: "sale" });
    const answers = await Promise.allSettled(
      Array.from({ length: 8 }, (_, i) =>
        (i % 2 ? shop : also).return("sale", { lines: [{ sku: "CAP", quantity: 4 }] }),
      ),
    );
    assert.equal(answers.filter(({ status }) => status === "fulfilled").length, 1);
    assert.deepEqual(await onHand(shop), { CAP: 7 });
  }),
};

const transactions: Readonly<Record<string, ConformanceCase["run"]>> = {
  "in a transaction it is undone with it": shopCase({ CAP: 5 }, async ({ hf, shop }) => {
    const failing = hf.transaction(async (tx) => {
      await shop.decrease("CAP", 2, { tx, externalId: "undone" });
      await shop.reserve([{ sku: "CAP", quantity: 1 }], { tx, id: "undone" });
      await shop.increase("NEW", 1);
      assert.equal((await shop.level("CAP", { tx })).available, 2);
      throw new Error("undo");
    });
    await assert.rejects(failing, /undo/);
    const { onHand: n, reserved } = await shop.level("CAP");
    assert.deepEqual([n, reserved], [5, 0]);
    assert.equal((await shop.decrease("CAP", 2, { externalId: "undone" })).replayed, false);
    await assert.rejects(shop.level("NEW"), UnknownSkuError);
  }),

  "in a transaction a refusal is no harm": shopCase({ CAP: 5 }, async ({ hf, shop }) => {
    await hf.transaction(async () => {
      await assert.rejects(shop.decrease("CAP", 9), InsufficientStockError);
      await assert.rejects(shop.decrease("MUG", 1), UnknownSkuError);
      await shop.decrease("CAP", 1, { externalId: "id" });
      await assert.rejects(shop.decrease("CAP", 2, { externalId: "id" }), StockConflictError);
      await shop.reserve([{ sku: "CAP", quantity: 2 }], { id: "cart" });
      await shop.commit("cart");
      await shop.return("id");
    });
    assert.deepEqual(await onHand(shop), { CAP: 3 });
  }),

  "in the caller's own transaction it takes part": async (ground) => {
    // Some sketches of engines have none.
    if (!isSupported(ground.capabilities.joinedLocks)) return;
    await shopCase({ CAP: 5, MUG: 5 }, async ({ shop, site }) => {
      await site.ownTransaction(async (native) => {
        await shop.apply([take("CAP"), take("MUG", 2)], { tx: native as object });
      });
      assert.deepEqual(await onHand(shop), { CAP: 4, MUG: 3 });
    })(ground);
  },

  "in the caller's own transaction, what others did after it began counts": async (ground) => {
    const { joinedLocks, connections, granularity, currentReads } = ground.capabilities;
    // Where there is one writer, nobody does anything meanwhile.
    if (!isSupported(joinedLocks) || connections === "one" || granularity === "database") return;
    await shopCase({ CAP: 9 }, async ({ hf, shop, also, site }) => {
      await site.ownTransaction(async (native) => {
        const tx = hf.join(native);
        assert.equal((await shop.level("CAP", { tx })).onHand, 9);
        await also.increase("MUG", 5);
        await also.decrease("CAP", 4, { externalId: "sale" });
        await also.reserve([{ sku: "MUG", quantity: 2 }], { id: "cart" });
        if (!isSupported(currentReads)) {
          await assert.rejects(shop.decrease("CAP", 6, { tx }), SerializationError);
          return;
        }
        await assert.rejects(shop.decrease("CAP", 6, { tx }), InsufficientStockError);
        assert.equal((await shop.decrease("CAP", 4, { tx, externalId: "sale" })).replayed, true);
        await shop.return("sale", { tx });
        await shop.commit("cart", { tx });
        await shop.decrease("CAP", 9, { tx });
      });
      const left = isSupported(currentReads) ? { CAP: 0, MUG: 3 } : { CAP: 5, MUG: 5 };
      assert.deepEqual(await onHand(shop), left);
    })(ground);
  },

  "whoever waits too long for somebody's transaction is told, and nothing was done": shopCase(
    { CAP: 5 },
    async ({ hf, shop, also, capabilities }) => {
      // Where all share one connection, it is that which they wait for.
      if (capabilities.connections === "one") return;
      const holder = (inside: () => Promise<void>) =>
        hf.transaction(async (tx) => {
          await shop.decrease("CAP", 1, { tx });
          await inside();
        });
      await during(holder, async () => {
        await assert.rejects(also.decrease("CAP", 1, { wait: 50 }), LockTimeoutError);
        await assert.rejects(
          also.apply([take("CAP"), { sku: "MUG", quantity: 1 }], { wait: 50 }),
          LockTimeoutError,
        );
      });
      assert.equal((await shop.level("CAP")).onHand, 4);
      await also.decrease("CAP", 4);
    },
  ),
};

const rushes: Readonly<Record<string, ConformanceCase["run"]>> = {
  "of many who want the last ones, as many get them as there are": shopCase(
    { CAP: 25 },
    async ({ shop, also }) => {
      const calls = Array.from({ length: 48 }, (_, i) => () => (i % 2 ? shop : also).decrease("CAP", 1));
      assert.equal(await taken(calls), 25);
      assert.deepEqual(await onHand(shop), { CAP: 0 });
    },
  ),

  "orders in any order, over each other: nobody waits for ever, and it all adds up": shopCase(
    { A: 12, B: 12, C: 12 },
    async ({ shop, also }) => {
      const turns = [
        ["A", "B", "C"],
        ["C", "A", "B"],
        ["B", "C", "A"],
        ["C", "B", "NEW"],
      ] as const;
      const calls = Array.from({ length: 40 }, (_, i) => () => {
        const [one, two, three] = turns[i % turns.length] as readonly [string, string, string];
        const last = three === "NEW" ? { sku: three, quantity: 1 } : take(three);
        return (i % 2 ? shop : also).apply([take(one), take(two), last]);
      });
      const done = await taken(calls);
      const { A = 0, B = 0, C = 0, NEW = 0 } = await onHand(shop);
      // Each took two of the three, or all of them.
      assert.equal(36 - A - B - C, 3 * done - NEW);
      // As long as there was enough, nobody was refused.
      assert.ok(Math.min(A, B, C) === 0);
    },
  ),

  "reservations, sales and returns at once add up": shopCase({ CAP: 20 }, async ({ shop, also }) => {
    const ends = await Promise.allSettled(
      Array.from({ length: 30 }, async (_, i) => {
        const by = i % 2 ? shop : also;
        if (i % 3 === 0) {
          const kept = await by.reserve([{ sku: "CAP", quantity: 2 }], {
            id: `cart ${i}`,
            ttl: i % 2 ? 1 : 60_000,
          });
          return i % 6 === 0 ? kept.commit() : kept.release();
        }
        await by.decrease("CAP", 2, { externalId: `sale ${i}` });
        return i % 3 === 1 ? by.return(`sale ${i}`) : undefined;
      }),
    );
    for (const end of ends)
      if (end.status === "rejected") {
        const { reason } = end as { readonly reason: unknown };
        assert.ok(reason instanceof InsufficientStockError || code("HF_STOCK_RESERVATION_ENDED")(reason));
      }
    const { onHand: n, available } = await shop.level("CAP");
    assert.ok(n >= 0 && available >= 0);
  }),
};

const lists: Readonly<Record<string, ConformanceCase["run"]>> = {
  "history is newest first, by pages, filtered": shopCase({ CAP: 9, MUG: 9 }, async ({ shop, fresh, hf }) => {
    for (let i = 1; i <= 5; i++)
      await shop.decrease(i % 2 ? "CAP" : "MUG", 1, {
        source: i === 3 ? "ORDER" : "ML_SALE",
        reference: { type: "order", id: `order ${i}` },
      });
    const seen: string[] = [];
    for (let after: string | undefined; ;) {
      const page = await shop.history({ limit: 2, after });
      seen.push(...page.movements.map(({ sku, balance }) => `${sku} ${balance}`));
      after = page.next;
      if (after === undefined) break;
    }
    assert.deepEqual(seen.slice(0, 5), ["CAP 6", "MUG 7", "CAP 7", "MUG 8", "CAP 8"]);
    assert.deepEqual(seen.slice(5).toSorted(), ["CAP 9", "MUG 9"]);
    const count = async (filter: object) => (await shop.history(filter)).movements.length;
    assert.equal(await count({ sku: "CAP" }), 4);
    assert.equal(await count({ sku: "CAP", location: "north" }), 0);
    assert.equal(await count({ source: "ORDER" }), 1);
    assert.equal(await count({ reference: { type: "order" } }), 5);
    assert.equal(await count({ reference: { id: "order 2" } }), 1);
    assert.deepEqual(await shop.byChannel(), [
      { source: "MANUAL", movements: 2, increased: 18, decreased: 0, net: 18 },
      { source: "ML_SALE", movements: 4, increased: 0, decreased: 4, net: -4 },
      { source: "ORDER", movements: 1, increased: 0, decreased: 1, net: -1 },
    ]);
    const book = (await stocks(hf)).find(({ name }) => name === fresh);
    assert.deepEqual(book, { name: fresh, levels: 2, elsewhere: false });
  }),

  "what was on hand at a time": shopCase({}, async ({ shop }) => {
    const [first, second] = [await shop.increase("CAP", 5), await shop.decrease("CAP", 2)];
    const before = new Date(first.at.getTime() - 1);
    assert.equal(await shop.levelAt("CAP", before), 0);
    assert.equal(await shop.levelAt("CAP", second.at), 3);
    assert.equal(await shop.levelAt("CAP", new Date(second.at.getTime() + 60_000)), 3);
    assert.equal((await shop.history({ to: before })).movements.length, 0);
    assert.equal((await shop.history({ from: first.at })).movements.length, 2);
  }),

  "levels by SKU, by location and by page": shopCase({ B: 1, A: 2, a: 3 }, async ({ shop }) => {
    await shop.increase("A", 4, { location: "north" });
    const names = async (options: Parameters<Stock["levels"]>[0]) =>
      (await shop.levels(options)).map(({ sku, location }) => `${sku} ${location}`);
    assert.deepEqual(await names({}), ["A main", "A north", "B main", "a main"]);
    assert.deepEqual(await names({ skus: ["A", "nothing"] }), ["A main", "A north"]);
    assert.deepEqual(await names({ skus: [] }), []);
    assert.deepEqual(await names({ location: "north" }), ["A north"]);
    assert.deepEqual(await names({ limit: 2, after: { sku: "A", location: "main" } }), ["A north", "B main"]);
    const { lines, short } = await shop.split([{ sku: "A", quantity: 5 }], { locations: ["main", "north"] });
    assert.deepEqual(
      [lines.map(({ location, quantity }) => [location, quantity]), short],
      [
        [
          ["main", -2],
          ["north", -3],
        ],
        [],
      ],
    );
  }),
};

export const stockCases = suite("stock", {
  ...orders,
  ...ids,
  ...reservations,
  ...returns,
  ...transactions,
  ...rushes,
  ...lists,
});
