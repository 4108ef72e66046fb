/** What changes stock: an order, decided with those of others, and what comes after a reservation or a sale. */
import { type AboutOptions, aboutOf } from "./checks.ts";
import { givenOr, idOf } from "./ids.ts";
import type { Places } from "./places.ts";
import { refuse, refuseSequel } from "./refusals.ts";
import type { OrderLine, OrderVerdict, Sequel, StockOrder } from "./store.ts";
import type { Applied, CallOptions, Where } from "./types.ts";

type Named = CallOptions & { readonly externalId?: string };

/** All lines or none. */
export async function move(
  places: Places,
  kind: "apply" | "adjust" | "transfer",
  lines: readonly OrderLine[],
  options: Named & AboutOptions,
  given = givenOr(options.externalId),
): Promise<Applied> {
  const id = idOf("externalId", given, options.externalId);
  const order: StockOrder = { kind, id, lines, about: aboutOf(options, "MANUAL"), ttlMs: undefined };
  const named = options.externalId !== undefined;
  const verdict = await places.together(kind, lines).order({ ...order, given, named }, options);
  refuse(order, verdict);
  return applied(given, verdict);
}

/** `given`: the id, as the caller knows it. */
export async function follow(
  places: Places,
  sequel: Sequel,
  options: Named & Where,
  given = sequel.id,
): Promise<OrderVerdict> {
  options.signal?.throwIfAborted();
  const { kind, of, lines } = sequel;
  const verdict = await places
    .whereabouts(kind, lines, options)
    .alone(
      options,
      (connection, store, book, how) => store.follow(connection, book, sequel, how),
      undefined,
      {
        names: [`stock ${places.book.name}: ${kind} of ${of}`],
        id: given,
        // Without lines the id follows from what it is about.
        named: lines === undefined || options.externalId !== undefined,
        locks: true,
      },
    );
  refuseSequel(sequel, verdict);
  return verdict;
}

export function applied(externalId: string, { outcome, at, lines }: OrderVerdict): Applied {
  return {
    externalId,
    replayed: outcome === "before",
    at: new Date(at),
    lines: lines.map(({ sku, location, quantity, onHand, version }) => ({
      sku,
      location,
      quantity,
      onHand,
      version,
    })),
  };
}
