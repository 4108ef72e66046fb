/** A small shop: a checkout page, and a webhook of a marketplace that sells the same things. */
import { randomUUID } from "node:crypto";
import express, { type ErrorRequestHandler, type Express } from "express";
import type { Holdfast } from "holdfast";
import {
  InsufficientStockError,
  type OwnLevels,
  StockConflictError,
  UnknownSkuError,
  stock,
} from "holdfast/stock";
import type { Catalog } from "./catalog.ts";

interface Item {
  readonly sku: string;
  readonly quantity: number;
}

export interface Services {
  readonly hf: Holdfast<unknown>;
  readonly catalog: Catalog;
  /** Of the stock: movements are kept by it. */
  readonly name?: string;
  /** Where what is on hand is kept, if it is in a column of the shop's own. */
  readonly levels?: OwnLevels | undefined;
}

export function shopOf({ hf, catalog, levels, name = "shop" }: Services) {
  const shelf = stock<{ reference: "purchase" | "ml-order" }>(hf, {
    name,
    ...(levels && { levels }),
  });

  /** The purchase and its movements are one transaction: both are there, or neither. */
  async function checkout(email: string, items: readonly Item[]): Promise<string> {
    const id = randomUUID();
    const price = await catalog.prices(items.map(({ sku }) => sku));
    const cents = items.reduce((sum, { sku, quantity }) => sum + (price.get(sku) ?? 0) * quantity, 0);
    await hf.transaction(async (tx) => {
      await catalog.purchase(tx, { id, email, cents });
      // Last: from here on others who want the same things wait for the end of this transaction.
      await shelf.apply(taken(items), {
        tx,
        source: "ORDER",
        reference: { type: "purchase", id },
        externalId: id,
        by: email,
      });
    });
    return id;
  }

  /** The marketplace sends each sale until it is told 200, and sometimes twice at once. */
  async function marketplaceSale(id: string, items: readonly Item[]): Promise<{ replayed: boolean }> {
    const { replayed } = await shelf.apply(taken(items), {
      source: "ML_SALE",
      reference: { type: "ml-order", id },
      externalId: `ml:${id}`,
    });
    return { replayed };
  }

  return { hf, shelf, checkout, marketplaceSale };
}

const taken = (items: readonly Item[]) => items.map(({ sku, quantity }) => ({ sku, quantity: -quantity }));

export type Shop = ReturnType<typeof shopOf>;

export function appOf({ shelf, checkout, marketplaceSale }: Shop): Express {
  const app = express();
  app.use(express.json());

  // Express 5 passes what an async handler throws on to the one for errors.
  /* oxlint-disable oxc/no-async-endpoint-handlers */
  app.get("/", async (_request, response) => {
    response.type("html").send(page(await shelf.levels()));
  });

  app.post("/checkout", async (request, response) => {
    const { email, items } = request.body as { email: string; items: Item[] };
    response.status(201).json({ purchase: await checkout(email, items) });
  });

  app.post("/webhooks/marketplace", async (request, response) => {
    const { id, items } = request.body as { id: string; items: Item[] };
    // 200 the first time, and each time it is sent again.
    response.json(await marketplaceSale(id, items));
  });
  /* oxlint-enable oxc/no-async-endpoint-handlers */

  const refuse: ErrorRequestHandler = (error, _request, response, next) => {
    if (error instanceof InsufficientStockError) response.status(409).json({ short: error.lines });
    else if (error instanceof UnknownSkuError) response.status(404).json({ unknown: error.lines });
    else if (error instanceof StockConflictError) response.status(422).json({ error: error.message });
    else next(error);
  };
  app.use(refuse);
  return app;
}

const escape = (text: string) => text.replaceAll(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

function page(levels: readonly { readonly sku: string; readonly available: number }[]): string {
  const rows = levels.map(
    ({ sku, available }) =>
      `<tr><td>${escape(sku)}</td><td>${available} left</td><td><input type="number" name="${escape(sku)}" min="0" max="${available}" value="0"></td></tr>`,
  );
  return `<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Checkout</title>
<h1>Checkout</h1>
<form>
  <table>${rows.join("")}</table>
  <label>E-mail <input type="email" name="email" required></label>
  <button>Buy</button>
  <output></output>
</form>
<script type="module">
  const form = document.querySelector("form");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const { email, ...counts } = Object.fromEntries(new FormData(form));
    const items = Object.entries(counts).map(([sku, n]) => ({ sku, quantity: Number(n) })).filter(({ quantity }) => quantity > 0);
    const response = await fetch("/checkout", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ email, items }),
    });
    const answer = await response.json();
    form.querySelector("output").textContent = response.ok
      ? "Thank you: " + answer.purchase
      : (answer.short ?? []).map(({ sku, short }) => short + " too many of " + sku).join(", ");
  });
</script>
</html>`;
}
