const holdfst: any = undefined; type holdfst = any;
import { pool } from "../../docs/reader.ts";
import { fromPg } from "holdfast/pg";
holdfst(fromPg(pool));
export {};
