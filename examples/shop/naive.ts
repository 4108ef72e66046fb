import { randomUUID } from "node:crypto";
import type { Shop } from "./app.ts";

/**
 * As it is often written: the pieces are taken, the card is charged, and if that fails all of it is rolled back. It is right,
 * and every test is green. But whoever else wants a mug waits for the bank. Do it in three steps: `shelf.reserve`, the bank
 * with nothing locked, then `confirm` or `release`.
 */
export function checkoutWithBank({ hf, shelf }: Shop, bank: string, sku: string): Promise<void> {
  return hf.transaction(async (tx) => {
    const id = randomUUID();
    await shelf.apply([{ sku, quantity: -1 }], { tx, source: "ORDER", externalId: id });
    const answer = await fetch(`${bank}?charge=${id}`);
    if (!answer.ok) throw new Error("the card was refused");
  });
}
