# Sourced by the batch files: run_job LAUNCHER OPTIONS... runs until done, and requeues the job where the run was ended
# early and saved. A job that somebody cancelled is not requeued.

run_job() {
    local code=0
    trap 'notice' USR1
    trap 'cancelled' TERM
    is_cancelled=
    "$@" &
    local launcher=$!
    # `wait` returns at each signal; the launcher's own code comes with the last one.
    while true; do
        code=0
        wait "$launcher" || code=$?
        kill -0 "$launcher" 2>/dev/null || break
    done
    if ((code == 75)) && [[ -z $is_cancelled && $(job_state) != CANCELLED ]]; then
        echo "job.sh: ended early with a checkpoint; the job is put back"
        scontrol requeue "$SLURM_JOB_ID" && exit 0
    fi
    return "$code"
}

notice() {
    # SLURM's notice of the time limit (--signal=B:USR1@seconds) comes to this script alone: on to every rank.
    scancel --signal=USR1 "$SLURM_JOB_ID"
}

cancelled() {
    # Of scancel alone, which tells the ranks too and takes no more signals, or by hand: scancel --batch --signal=TERM.
    is_cancelled=1
    scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null || true
}

job_state() {
    scontrol --oneliner show job "$SLURM_JOB_ID" | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p'
}
