/** What is kept apart for a while: taken in the end, given back, or over. */
import { callNames } from "../batch/calls.ts";
import { checkNames } from "../input/options.ts";
import { checkId, checkSpan } from "../input/values.ts";
import { above, aboutNames, aboutOf } from "./checks.ts";
import { givenOr, idOf } from "./ids.ts";
import { applied, follow } from "./orders.ts";
import type { Places } from "./places.ts";
import { refuse } from "./refusals.ts";
import type { OrderLine, StockOrder } from "./store.ts";
import type {
  Applied,
  CallOptions,
  Line,
  MovementOptions,
  Reservation,
  ReserveOptions,
  StockWords,
  Where,
} from "./types.ts";

const reserveNames = new Set([...aboutNames, "id", "ttl"]);
const commitNames = new Set([...aboutNames, "sku"]);
const releaseNames = new Set([...callNames, "sku"]);

export class Reservations<W extends StockWords> {
  readonly #places: Places;

  constructor(places: Places) {
    this.#places = places;
  }

  async reserve(lines: readonly Line[], options: ReserveOptions<W>): Promise<Reservation<W>> {
    checkNames("reserve", options, reserveNames);
    const { ttl = 900_000 } = options;
    checkSpan("reserve", "ttl", ttl);
    const given = givenOr(options.id);
    const id = idOf("id", given, options.id);
    const order: StockOrder = {
      kind: "reserve",
      id,
      lines: this.#places.lines("reserve", lines, above),
      about: aboutOf(options, "ORDER"),
      ttlMs: ttl,
    };
    const batcher = this.#places.together("reserve", order.lines);
    const verdict = await batcher.order({ ...order, given, named: options.id !== undefined }, options);
    refuse(order, verdict);
    const [{ sku }] = order.lines as [OrderLine];
    return {
      id: given,
      until: new Date(verdict.until ?? Number.NaN),
      state: verdict.state as "open" | "committed",
      replayed: verdict.outcome === "before",
      lines: order.lines,
      commit: (more) => this.commit(given, { sku, ...more }),
      release: (more) => this.release(given, { sku, ...more }),
    };
  }

  async commit(
    reservation: string,
    options: Omit<MovementOptions<W>, "externalId"> & Where,
  ): Promise<Applied> {
    checkNames("commit", options, commitNames);
    const of = checkId("commit", "reservation", reservation);
    const sequel = { id: `commit:${of}`, of, about: aboutOf(options, ""), lines: undefined };
    const verdict = await follow(this.#places, { kind: "commit", ...sequel }, options);
    return applied(`commit:${reservation}`, verdict);
  }

  async release(reservation: string, options: CallOptions & Where): Promise<void> {
    checkNames("release", options, releaseNames);
    const of = checkId("release", "reservation", reservation);
    const sequel = { id: `release:${of}`, of, about: aboutOf({}, ""), lines: undefined };
    await follow(this.#places, { kind: "release", ...sequel }, options);
  }
}
