import diagnostics from "node:diagnostics_channel";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { type Events, type Holdfast, holdfast, key, rows } from "holdfast";
import { fromPg } from "holdfast/pg";
import type { ClientBase } from "pg";
import { command, open } from "../support.ts";

const orders = "holdfast_example_bought";
const stock = "holdfast_example_piece";

interface Shop {
  checkout(id: number, sku: string): Promise<void>;
  restock(sku: string): Promise<void>;
}

/**
 * As it is often written. It is right, and every test is green. But whoever wants the order, or the piece, waits for the
 * payment service; and a checkout and a delivery that meet are a deadlock.
 */
function naive(hf: Holdfast<ClientBase>, pay: (id: number) => Promise<string>): Shop {
  return {
    checkout: (id, sku) =>
      hf.transaction({ lock: key("checkout", id) }, async ({ client }) => {
        await client.query(`UPDATE ${orders} SET status = 'paying' WHERE id = $1`, [id]);
        const receipt = await pay(id);
        await client.query(`UPDATE ${stock} SET left_over = left_over - 1 WHERE sku = $1`, [sku]);
        await client.query(`UPDATE ${orders} SET status = $2 WHERE id = $1`, [id, receipt]);
      }),
    restock: (sku) =>
      hf.transaction(async ({ client }) => {
        await client.query(`UPDATE ${stock} SET left_over = left_over + 10 WHERE sku = $1`, [sku]);
        await client.query(`UPDATE ${orders} SET status = 'new' WHERE sku = $1 AND status = 'waits'`, [sku]);
      }),
  };
}

/** What takes long comes first, under the order's id, so that it can be repeated. What is locked is locked in one order. */
function careful(hf: Holdfast<ClientBase>, pay: (id: number) => Promise<string>): Shop {
  return {
    async checkout(id, sku) {
      const receipt = await pay(id);
      await hf.transaction(async (tx) => {
        await tx.lockAll([key("checkout", id), rows(orders, [id]), rows(stock, [sku])]);
        await tx.client.query(`UPDATE ${stock} SET left_over = left_over - 1 WHERE sku = $1`, [sku]);
        await tx.client.query(`UPDATE ${orders} SET status = $2 WHERE id = $1`, [id, receipt]);
      });
    },
    restock: (sku) =>
      hf.transaction(async (tx) => {
        const { rows: waiting } = await tx.client.query<{ id: number }>(
          `SELECT id FROM ${orders} WHERE sku = $1 AND status = 'waits'`,
          [sku],
        );
        const ids = waiting.map(({ id }) => id);
        await tx.lockAll([rows(orders, ids), rows(stock, [sku])]);
        await tx.client.query(`UPDATE ${orders} SET status = 'new' WHERE id = ANY ($1)`, [ids]);
        await tx.client.query(`UPDATE ${stock} SET left_over = left_over + 10 WHERE sku = $1`, [sku]);
      }),
  };
}

/** `index.ts:42`. */
function short(place: string | undefined): string {
  return /[^/\\]+:\d+(?=:\d+$)/.exec(place ?? "")?.[0] ?? "?";
}

interface Seen {
  readonly hazards: readonly string[];
  readonly slow: readonly string[];
}

async function watch(run: () => Promise<void>): Promise<Seen> {
  const hazards: string[] = [];
  const slow: string[] = [];
  const onHazard = (event: unknown) => {
    const { kind, place } = event as Events["holdfast:hazard"];
    hazards.push(`${kind} at ${short(place)}`);
  };
  const onSlow = (event: unknown) => {
    const { locks, place, hazards: meanwhile } = event as Events["holdfast:section:slow"];
    slow.push(`${locks.join(", ")} at ${short(place)}: ${Object.keys(meanwhile).join(", ")}`);
  };
  diagnostics.subscribe("holdfast:hazard", onHazard);
  diagnostics.subscribe("holdfast:section:slow", onSlow);
  try {
    await run();
  } finally {
    diagnostics.unsubscribe("holdfast:hazard", onHazard);
    diagnostics.unsubscribe("holdfast:section:slow", onSlow);
  }
  return { hazards, slow };
}

export interface Result {
  readonly careful: Seen;
  readonly naive: Seen;
}

/** The same two calls both ways, one after the other: no two of them ever meet. */
export async function main(url: string): Promise<Result> {
  await using place = await open(url, {
    [orders]: "id int PRIMARY KEY, sku text NOT NULL, status text NOT NULL",
    [stock]: "sku text PRIMARY KEY, left_over int NOT NULL",
  });
  const { pool } = place;
  await pool.query(`INSERT INTO ${orders} VALUES (1, 'CAP', 'new'), (2, 'CAP', 'waits')`);
  await pool.query(`INSERT INTO ${stock} VALUES ('CAP', 10)`);
  // A payment takes half a second; slow is what takes longer than 400 ms, so that no busy machine is taken for a mistake.
  const service = createServer((_, response) => void setTimeout(() => response.end("paid"), 500));
  await new Promise<void>((resolve) => service.listen(0, "127.0.0.1", resolve));
  const { port } = service.address() as AddressInfo;
  const pay = async (id: number) => (await fetch(`http://127.0.0.1:${port}/pay/${id}`)).text();
  await using hf = holdfast(fromPg(pool), { hazards: "count", slow: { suspect: 400 } });
  const run = ({ checkout, restock }: Shop) =>
    watch(async () => {
      await checkout(1, "CAP");
      await restock("CAP");
    });
  try {
    return { careful: await run(careful(hf, pay)), naive: await run(naive(hf, pay)) };
  } finally {
    service.close();
    service.closeAllConnections();
  }
}

await command(import.meta.url, main, (result) =>
  Object.entries(result)
    .map(([way, { hazards, slow }]: [string, Seen]) =>
      [
        `${way}: ${hazards.length} hazards, ${slow.length} slow`,
        ...hazards.map((each) => `  ${each}`),
        ...slow.map((each) => `  slow: ${each}`),
      ].join("\n"),
    )
    .join("\n"),
);
