/** Rows of stock's tables, by the names of their columns. Moments are whole microseconds since 1970; undefined is NULL. */

export interface LevelRow {
  readonly id: number;
  readonly book: string;
  readonly sku: string;
  readonly location: string;
  readonly on_hand: number;
  /** The sum of its lines in `stock_reserved`, with those that have run out. */
  readonly reserved: number;
  readonly min_level: number;
  /** Of its newest movement; 0: there is none. */
  readonly version: number;
  /** What is on hand is kept in a table of the caller's. */
  readonly elsewhere: boolean;
}

/** Only ever added to. */
export interface MovementRow {
  readonly level: number;
  readonly version: number;
  readonly quantity: number;
  readonly balance: number;
  readonly at: number;
  /** The how manieth line of its call, of how many. */
  readonly line: number;
  readonly parts: number;
  readonly kind: string;
  readonly source: string;
  readonly external_id: string;
  readonly reference_type: string | undefined;
  readonly reference_id: string | undefined;
  readonly user_id: string | undefined;
  readonly note: string | undefined;
  /** Of a return: what was sold. */
  readonly origin: string | undefined;
}

export interface ReservationRow {
  readonly book: string;
  readonly id: string;
  readonly state: "open" | "committed" | "released";
  readonly until: number;
  readonly made_at: number;
  readonly levels: readonly number[];
  readonly quantities: readonly number[];
  readonly source: string;
  readonly reference_type: string | undefined;
  readonly reference_id: string | undefined;
  readonly user_id: string | undefined;
  readonly note: string | undefined;
}

/** A line of a reservation that is open. */
export interface ReservedRow {
  readonly level: number;
  readonly reservation: string;
  readonly quantity: number;
  readonly until: number;
}
