"""The ledger of chip-time, the price book, baselines of other hardware."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "baselines",
        sa.Column("baseline_id", sa.String(length=64), nullable=False),
        sa.Column("accelerator", sa.String(length=64), nullable=False),
        sa.Column("num_chips", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("engine", sa.String(length=200), nullable=False),
        sa.Column("dtype", sa.String(length=64), nullable=False),
        sa.Column("isl", sa.BigInteger(), nullable=True),
        sa.Column("osl", sa.BigInteger(), nullable=True),
        sa.Column("concurrency", sa.BigInteger(), nullable=True),
        sa.Column("output_tokens_per_s_chip", sa.String(length=48), nullable=True),
        sa.Column("total_tokens_per_s_chip", sa.String(length=48), nullable=True),
        sa.Column("grade", sa.String(length=1), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("date", sa.String(length=64), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("baseline_id", name=op.f("pk_baselines")),
    )
    op.create_index("ix_baselines_model", "baselines", ["model"], unique=False)
    op.create_table(
        "charges",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            sa.Identity(always=False, start=1, increment=1),
            nullable=False,
        ),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("price_id", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("group_id", sa.String(length=200), nullable=False),
        sa.Column("request_id", sa.String(length=200), nullable=False),
        sa.Column("key_id", sa.String(length=200), nullable=False),
        sa.Column("tag", sa.String(length=200), nullable=False),
        sa.Column("status", sa.String(length=64), nullable=False),
        sa.Column("loaded_ns", sa.BigInteger(), nullable=False),
        sa.Column("loaded_prefill_ns", sa.BigInteger(), nullable=False),
        sa.Column("loaded_decode_ns", sa.BigInteger(), nullable=False),
        sa.Column("method", sa.String(length=64), nullable=False),
        sa.Column("fit_id", sa.String(length=64), nullable=False),
        sa.Column("first_number", sa.BigInteger(), nullable=True),
        sa.Column("last_number", sa.BigInteger(), nullable=True),
        sa.Column("closing_id", sa.BigInteger(), nullable=True),
        sa.Column("prefill_ns", sa.BigInteger(), nullable=False),
        sa.Column("decode_ns", sa.BigInteger(), nullable=False),
        sa.Column("fitted_ns", sa.BigInteger(), nullable=False),
        sa.Column("recomputed_ns", sa.BigInteger(), nullable=False),
        sa.Column("discarded_ns", sa.BigInteger(), nullable=False),
        sa.Column("uncached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("written_tokens", sa.BigInteger(), nullable=False),
        sa.Column("recomputed_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("delivered_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_charges")),
    )
    op.create_index("ix_charges_hour", "charges", ["hour"], unique=False)
    op.create_index("ix_charges_period", "charges", ["model", "hour", "price_id"], unique=False)
    op.create_index("ix_charges_request", "charges", ["request_id"], unique=False)
    op.create_table(
        "chip_bad_batches",
        sa.Column("message_id", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("message_id", name=op.f("pk_chip_bad_batches")),
    )
    op.create_table(
        "chip_entries",
        sa.Column("group_id", sa.String(length=200), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("begin_ns", sa.BigInteger(), nullable=False),
        sa.Column("end_ns", sa.BigInteger(), nullable=False),
        sa.Column("unix_end_ns", sa.BigInteger(), nullable=False),
        sa.Column("price_id", sa.String(length=64), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("hash", sa.LargeBinary(length=16), nullable=False),
        sa.PrimaryKeyConstraint("group_id", "number", name=op.f("pk_chip_entries")),
    )
    op.create_index("ix_chip_entries_end", "chip_entries", ["unix_end_ns"], unique=False)
    op.create_table(
        "chip_groups",
        sa.Column("group_id", sa.String(length=200), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("worker_id", sa.String(length=200), nullable=False),
        sa.Column("engine", sa.String(length=64), nullable=False),
        sa.Column("sku", sa.String(length=64), nullable=False),
        sa.Column("region", sa.String(length=64), nullable=False),
        sa.Column("num_chips", sa.BigInteger(), nullable=False),
        sa.Column("granted_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("next_number", sa.BigInteger(), nullable=False),
        sa.Column("head", sa.LargeBinary(length=16), nullable=False),
        sa.Column("end_ns", sa.BigInteger(), nullable=False),
        sa.Column("seen_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("next_step", sa.BigInteger(), nullable=False),
        sa.Column("computed_tokens", sa.BigInteger(), nullable=False),
        sa.Column("padded_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("delivered_tokens", sa.BigInteger(), nullable=False),
        sa.Column("ended", sa.String(length=64), nullable=False),
        sa.Column("broken_at", sa.BigInteger(), nullable=True),
        sa.Column("broken_why", sa.Text(), nullable=False),
        sa.Column("first_kept", sa.BigInteger(), nullable=False),
        sa.Column("checkpoint", sa.LargeBinary(length=16), nullable=True),
        sa.PrimaryKeyConstraint("group_id", name=op.f("pk_chip_groups")),
    )
    op.create_index("ix_chip_groups_ended", "chip_groups", ["ended"], unique=False)
    op.create_table(
        "closings",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            sa.Identity(always=False, start=1, increment=1),
            nullable=False,
        ),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("price_id", sa.String(length=64), nullable=False),
        sa.Column("measured_ns", sa.BigInteger(), nullable=False),
        sa.Column("active_ns", sa.BigInteger(), nullable=False),
        sa.Column("spread_ns", sa.BigInteger(), nullable=False),
        sa.Column("closed_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_closings")),
    )
    op.create_index("ix_closings_period", "closings", ["model", "hour", "price_id"], unique=False)
    op.create_table(
        "fits",
        sa.Column("fit_id", sa.String(length=64), nullable=False),
        sa.Column("bucket", sa.String(length=200), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("sku", sa.String(length=64), nullable=False),
        sa.Column("fixed", sa.BigInteger(), nullable=False),
        sa.Column("prefill", sa.BigInteger(), nullable=False),
        sa.Column("attention", sa.BigInteger(), nullable=False),
        sa.Column("decode", sa.BigInteger(), nullable=False),
        sa.Column("context", sa.BigInteger(), nullable=False),
        sa.Column("residual_ppm", sa.BigInteger(), nullable=False),
        sa.Column("proportional_ppm", sa.BigInteger(), nullable=False),
        sa.Column("num_steps", sa.BigInteger(), nullable=False),
        sa.Column("first_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("last_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("fitted_unix_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("fit_id", "bucket", name=op.f("pk_fits")),
    )
    op.create_index("ix_fits_model", "fits", ["model", "fitted_unix_ns"], unique=False)
    op.create_table(
        "open_charges",
        sa.Column("group_id", sa.String(length=200), nullable=False),
        sa.Column("request_id", sa.String(length=200), nullable=False),
        sa.Column("key_id", sa.String(length=200), nullable=False),
        sa.Column("tag", sa.String(length=200), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("price_id", sa.String(length=64), nullable=False),
        sa.Column("first_number", sa.BigInteger(), nullable=False),
        sa.Column("last_number", sa.BigInteger(), nullable=False),
        sa.Column("fit_id", sa.String(length=64), nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_choices", sa.BigInteger(), nullable=False),
        sa.Column("prefill_ns", sa.BigInteger(), nullable=False),
        sa.Column("decode_ns", sa.BigInteger(), nullable=False),
        sa.Column("fitted_ns", sa.BigInteger(), nullable=False),
        sa.Column("recomputed_ns", sa.BigInteger(), nullable=False),
        sa.Column("discarded_ns", sa.BigInteger(), nullable=False),
        sa.Column("uncached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("written_tokens", sa.BigInteger(), nullable=False),
        sa.Column("recomputed_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("delivered_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("group_id", "request_id", name=op.f("pk_open_charges")),
    )
    op.create_table(
        "periods",
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("hour", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("price_id", sa.String(length=64), nullable=False),
        sa.Column("group_id", sa.String(length=200), nullable=False),
        sa.Column("measured_ns", sa.BigInteger(), nullable=False),
        sa.Column("step_ns", sa.BigInteger(), nullable=False),
        sa.Column("bubble_ns", sa.BigInteger(), nullable=False),
        sa.Column("idle_ns", sa.BigInteger(), nullable=False),
        sa.Column("provision_ns", sa.BigInteger(), nullable=False),
        sa.Column("weights_ns", sa.BigInteger(), nullable=False),
        sa.Column("compile_ns", sa.BigInteger(), nullable=False),
        sa.Column("drain_ns", sa.BigInteger(), nullable=False),
        sa.Column("fault_ns", sa.BigInteger(), nullable=False),
        sa.Column("probe_ns", sa.BigInteger(), nullable=False),
        sa.Column("num_steps", sa.BigInteger(), nullable=False),
        sa.Column("fitted_ns", sa.BigInteger(), nullable=False),
        sa.Column("residual_ns", sa.BigInteger(), nullable=False),
        sa.Column("prefill_tokens", sa.BigInteger(), nullable=False),
        sa.Column("decode_tokens", sa.BigInteger(), nullable=False),
        sa.Column("recomputed_tokens", sa.BigInteger(), nullable=False),
        sa.Column("padded_tokens", sa.BigInteger(), nullable=False),
        sa.Column("rejected_tokens", sa.BigInteger(), nullable=False),
        sa.Column("failed_tokens", sa.BigInteger(), nullable=False),
        sa.Column("padding_ns", sa.BigInteger(), nullable=False),
        sa.Column("rejected_ns", sa.BigInteger(), nullable=False),
        sa.Column("is_closed", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("model", "hour", "price_id", "group_id", name=op.f("pk_periods")),
    )
    op.create_index("ix_periods_closed", "periods", ["is_closed"], unique=False)
    op.create_index("ix_periods_hour", "periods", ["hour"], unique=False)
    op.create_table(
        "prices",
        sa.Column("price_id", sa.String(length=64), nullable=False),
        sa.Column("sku", sa.String(length=64), nullable=False),
        sa.Column("region", sa.String(length=64), nullable=False),
        sa.Column("term", sa.String(length=64), nullable=False),
        sa.Column("usd_per_chip_hour", sa.String(length=48), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("effective_from_ns", sa.BigInteger(), nullable=False),
        sa.Column("effective_to_ns", sa.BigInteger(), nullable=True),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("retrieved_at", sa.String(length=64), nullable=False),
        sa.Column("added_unix_ns", sa.BigInteger(), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("price_id", name=op.f("pk_prices")),
    )
    op.create_index("ix_prices_sku", "prices", ["sku", "effective_from_ns"], unique=False)
    op.create_table(
        "rollups",
        sa.Column("grain_s", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("key_id", sa.String(length=200), nullable=False),
        sa.Column("tag", sa.String(length=200), nullable=False),
        sa.Column("price_id", sa.String(length=64), nullable=False),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        sa.Column("loaded_ns", sa.BigInteger(), nullable=False),
        sa.Column("loaded_prefill_ns", sa.BigInteger(), nullable=False),
        sa.Column("loaded_decode_ns", sa.BigInteger(), nullable=False),
        sa.Column("aborted_ns", sa.BigInteger(), nullable=False),
        sa.Column("failed_ns", sa.BigInteger(), nullable=False),
        sa.Column("aborted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("failed_tokens", sa.BigInteger(), nullable=False),
        sa.Column("prefill_ns", sa.BigInteger(), nullable=False),
        sa.Column("decode_ns", sa.BigInteger(), nullable=False),
        sa.Column("fitted_ns", sa.BigInteger(), nullable=False),
        sa.Column("recomputed_ns", sa.BigInteger(), nullable=False),
        sa.Column("discarded_ns", sa.BigInteger(), nullable=False),
        sa.Column("uncached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("written_tokens", sa.BigInteger(), nullable=False),
        sa.Column("recomputed_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("delivered_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "grain_s", "start", "model", "key_id", "tag", "price_id", name=op.f("pk_rollups")
        ),
    )


def downgrade() -> None:
    op.drop_table("rollups")
    op.drop_table("prices")
    op.drop_table("periods")
    op.drop_table("open_charges")
    op.drop_table("fits")
    op.drop_table("closings")
    op.drop_table("chip_groups")
    op.drop_table("chip_entries")
    op.drop_table("chip_bad_batches")
    op.drop_table("charges")
    op.drop_table("baselines")
