import { expect, test } from "vitest";
import { Coalescer, Failed } from "../../packages/holdfast/src/batch/coalesce.ts";

/** Batches that end when they are told to. */
function batches(options: { inFlight?: number; most?: number; together?: number } = {}) {
  const open: { items: readonly number[]; end: (failure?: Error) => void }[] = [];
  const sizes: number[] = [];
  let flying = 0;
  let highest = 0;
  const coalescer = new Coalescer<number, number>({
    inFlight: 2,
    most: 256,
    ...options,
    run: (items) =>
      new Promise((resolve, reject) => {
        sizes.push(items.length);
        highest = Math.max(highest, ++flying);
        open.push({
          items,
          end(failure) {
            flying--;
            if (failure) reject(failure);
            else resolve(items.map((item) => (item < 0 ? new Failed(new Error(`no ${item}`)) : item * 10)));
          },
        });
      }),
  });
  return { coalescer, open, sizes, highest: () => highest };
}

const turn = () => new Promise((resolve) => setImmediate(resolve));

test("who comes alone goes at once", () => {
  const { coalescer, sizes } = batches();
  void coalescer.add(1);
  expect(sizes).toEqual([1]);
});

test("what queued while a batch was in flight goes together, and each gets its own answer", async () => {
  const { coalescer, open, sizes } = batches({ inFlight: 1 });
  const answers = [1, 2, 3, 4].map((item) => coalescer.add(item));
  await turn();
  expect(sizes).toEqual([1]);
  open[0]?.end();
  await turn();
  await turn();
  expect(open[1]?.items).toEqual([2, 3, 4]);
  open[1]?.end();
  expect(await Promise.all(answers)).toEqual([10, 20, 30, 40]);
});

test("those who were answered together come again together", async () => {
  const { coalescer, open, sizes } = batches();
  const caller = async (item: number) => {
    for (let round = 0; round < 4; round++) await coalescer.add(item);
  };
  const callers = Promise.all(Array.from({ length: 20 }, (_, i) => caller(i)));
  for (let ended = 0; ended < 100 && sizes.reduce((sum, size) => sum + size, 0) < 80; ended++) {
    await turn();
    await turn();
    open.shift()?.end();
  }
  await turn();
  for (const batch of open) batch.end();
  await callers;
  // The first had nobody to go with.
  expect(sizes[0]).toBe(1);
  expect(sizes.length).toBeLessThanOrEqual(10);
});

test("more than go together are shared out, and no more batches are under way than may be", async () => {
  const { coalescer, open, sizes, highest } = batches({ together: 8, most: 50 });
  const answers = [coalescer.add(0), coalescer.add(0)];
  await turn();
  for (let i = 0; i < 6; i++) answers.push(coalescer.add(i));
  for (const batch of open.splice(0)) batch.end();
  await turn();
  await turn();
  // Too few to be worth two.
  expect(sizes).toEqual([1, 1, 6]);
  for (let i = 0; i < 200; i++) answers.push(coalescer.add(i));
  await turn();
  expect(sizes).toEqual([1, 1, 6, 50]);
  for (const batch of open.splice(0)) batch.end();
  await turn();
  await turn();
  expect(sizes).toEqual([1, 1, 6, 50, 50, 50]);
  for (const batch of open.splice(0)) batch.end();
  await turn();
  await turn();
  expect(sizes).toEqual([1, 1, 6, 50, 50, 50, 25, 25]);
  for (const batch of open.splice(0)) batch.end();
  expect((await Promise.all(answers)).length).toBe(208);
  expect(highest()).toBe(2);
});

test("an error of one is its own, an error of the batch is everybody's", async () => {
  const { coalescer, open } = batches({ inFlight: 1 });
  const first = coalescer.add(1);
  const [own, other] = [coalescer.add(-2), coalescer.add(3)];
  open[0]?.end();
  await first;
  await turn();
  open[1]?.end();
  await expect(own).rejects.toThrow("no -2");
  expect(await other).toBe(30);
  const all = [coalescer.add(4), coalescer.add(5)];
  await turn();
  open[2]?.end(new Error("lost"));
  for (const each of all) await expect(each).rejects.toThrow("lost");
});

test("who gives up while it queues leaves the line", async () => {
  const { coalescer, open } = batches({ inFlight: 1 });
  const first = coalescer.add(1);
  const giveUp = new AbortController();
  const [gone, stays] = [coalescer.add(2, giveUp.signal), coalescer.add(3)];
  giveUp.abort(new Error("enough"));
  await expect(gone).rejects.toThrow("enough");
  open[0]?.end();
  await first;
  await turn();
  expect(open[1]?.items).toEqual([3]);
  open[1]?.end();
  expect(await stays).toBe(30);
});
